"""A character-level GPT, trained on the source text of Python's own standard library.

paceline run --nproc 2 examples/gpt.py --steps 200
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--context", type=int, default=64)
options = parser.parse_args()


class Text(Dataset):
    """Overlapping pieces of a text; the target is the next character."""

    def __init__(self, text: str, context: int) -> None:
        self.letters = sorted(set(text))
        number = {letter: i for i, letter in enumerate(self.letters)}
        self.codes = torch.tensor([number[letter] for letter in text])
        self.context = context
        self.fingerprint = f"{len(text)} characters of the standard library, context {context}"

    def __len__(self) -> int:
        return (len(self.codes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.codes[index * self.context : (index + 1) * self.context + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.look, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.look(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.think(self.after(x))


class GPT(nn.Module):
    def __init__(self, letters: int, context: int, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)
        self.out.weight = self.letter.weight  # tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.out(self.norm(self.blocks(self.letter(x) + self.place(places))))


folder = Path(sysconfig.get_paths()["stdlib"])
names = ("argparse", "ast", "asyncio/tasks", "decimal", "difflib", "inspect", "pathlib", "tarfile", "typing", "zipfile")
files = [path for name in names if (path := folder / f"{name}.py").exists()]
text = "".join(path.read_text(encoding="utf-8") for path in files).encode("ascii", "ignore").decode()

pace = paceline.init()
data = Text(text, options.context)
torch.manual_seed(0)
model = GPT(len(data.letters), options.context).to(pace.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model = pace.wrap(model, optimizer)
loader = pace.loader(data, options.batch_size, drop_last=True)

while loader.step < options.steps:
    for x, y in loader:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if pace.is_main and (loader.step % 50 == 0 or loader.step == options.steps):
            print(f"step {loader.step}: loss {loss.item():.3f} on this worker's share, split {loader.split}")
        if loader.step == options.steps:
            break
