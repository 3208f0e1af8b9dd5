"""The ladder: the cost of a recipe over model sizes and token counts, fitted, predicted and graded."""
