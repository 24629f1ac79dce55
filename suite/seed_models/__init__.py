"""The seed models that come with the project, one safetensors file each, and `make`, which trains them."""
