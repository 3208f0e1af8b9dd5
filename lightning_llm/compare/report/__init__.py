"""The report of a comparison: one HTML page, a PDF, pictures, and tables and a methods paragraph for a paper."""
