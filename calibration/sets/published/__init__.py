"""Makes a set of networks with published weights: torchvision's, and timm's as an extra."""
