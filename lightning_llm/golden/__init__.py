"""Golden curves: the first steps of a recipe, recorded, and held against the same steps made anew."""
