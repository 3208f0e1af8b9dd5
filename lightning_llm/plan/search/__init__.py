"""The search for a layout: which one `plan --search` finds fastest among those that fit. Imports no torch."""
