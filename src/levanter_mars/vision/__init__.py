"""Image classification on Levanter's trainer: a ResNet with named axes, CIFAR and scikit-learn's digits, precise batch normalization."""
