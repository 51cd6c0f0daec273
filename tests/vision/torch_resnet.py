"""`torch_resnet.py IN.npz OUT.npz`, run by a Python with torch: what a PyTorch ResNet-18 of CIFAR's form says with the weights in IN.

IN holds a state dict, and `images/train` and `images/test` as [n, color, height, width]. OUT gets the parameter count, the logits of the
first by their batch's statistics, and those of the second by the running statistics of the state dict.
"""

import sys

import numpy as np
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, before: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        projection = (nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.shortcut = nn.Sequential(*projection) if stride > 1 or before != width else nn.Sequential()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


def resnet18(classes: int) -> nn.Sequential:
    stages = [Block(64, 64, 1), Block(64, 64, 1)]
    for width in (128, 256, 512):
        stages += [Block(width // 2, width, 2), Block(width, width, 1)]
    model = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), *stages)
    return model.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)])


source, target = sys.argv[1:]
given = {name: torch.from_numpy(value) for name, value in np.load(source).items()}
train, test = given.pop("images/train"), given.pop("images/test")
model = resnet18(classes=10)
model.load_state_dict({**given, **{k: v for k, v in model.state_dict().items() if k.endswith("num_batches_tracked")}})
with torch.no_grad():
    of_test = model.eval()(test)  # before training overwrites the running statistics
    of_train = model.train()(train)
np.savez(target, count=sum(p.numel() for p in model.parameters()), train=of_train, test=of_test)
