"""The report of a comparison: one HTML page, pictures, and tables and a methods paragraph for a paper."""
