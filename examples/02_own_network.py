"""Make your own network elastic: see which filters can be dropped and what that saves."""

import torch
from torch import Tensor, nn

import pliant as pl


class OwnNet(nn.Module):
    """A residual block between two convolutions, in plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, stride=2, padding=1)
        self.body = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.tail = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(self.tail(x + self.body(x)))
        return self.head(x.mean(dim=(2, 3)))


net = pl.elastic(OwnNet(), example=torch.zeros(1, 1, 28, 28))
print(net.summary())

subnet = net.draw([0.5] * len(net.sites), pl.rng_stream(0, "example"))
print(f"full {net.macs(0.0):,.0f} MACs, this subnet {net.macs(subnet):,.0f}")

trainer = pl.SubnetTrainer(net, pl.get_params(net.module), pl.Sgd(lr=0.1))
images, labels = torch.randn(32, 1, 28, 28), torch.randint(10, (32,))
for step in range(3):
    trainer.switch(net.draw([0.5] * len(net.sites), pl.rng_stream(0, "example", step)))
    loss = trainer.step(images, lambda output: nn.functional.cross_entropy(output, labels), lr=0.1)
    print(f"step {step}: loss {float(loss):.3f}")
