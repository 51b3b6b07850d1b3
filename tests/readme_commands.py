"""The commands of the README, as somebody types them in a fresh clone.

python tests/readme_commands.py README.md    # prints them, one a line
python tests/readme_commands.py README.md 1.357    # is that what it says?
"""

import pathlib
import re
import sys


def commands(readme: str) -> list[str]:
  """Returns the lines of its block of shell commands."""
  (block,) = re.findall(r'```bash\n(.*?)```', readme, re.S)
  return block.strip().splitlines()


def check_loss(readme: str, loss: float) -> None:
  """Raises if the training of the first command ends elsewhere."""
  least, most = re.search(
    r'validation loss between ([\d.]+) and ([\d.]+)', readme
  ).groups()
  assert float(least) <= loss <= float(most), (least, loss, most)


def main(path: str, loss: str | None = None) -> None:
  readme = pathlib.Path(path).read_text()
  if loss is None:
    print('\n'.join(commands(readme)))
  else:
    check_loss(readme, float(loss))


if __name__ == '__main__':
  main(*sys.argv[1:])
