"""bucketgraph: static-shape buckets over CUDA graphs for PyTorch inference."""
