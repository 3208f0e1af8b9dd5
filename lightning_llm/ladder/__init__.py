"""The ladder: what a recipe costs over model sizes and token counts, fitted, predicted, and graded when it is run."""
