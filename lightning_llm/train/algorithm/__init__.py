"""Training algorithms: kinds (`*_spec.py`), and what each does to the weights beside the optimizer's update."""
