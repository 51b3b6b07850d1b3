"""Tables and numbers as people read them."""

import html
from collections.abc import Sequence

Row = Sequence[str]


def aligned(rows: Sequence[Row]) -> list[str]:
  """Lines of a terminal: the first column to the left, all others right."""
  widths = [max(map(len, column)) for column in zip(*rows)]
  lines = []
  for row in rows:
    cells = [row[0].ljust(widths[0])]
    cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
    lines.append('  '.join(cells).rstrip())
  return lines


def as_html(rows: Sequence[Row]) -> str:
  """Returns the same for a notebook; the first row is the header."""

  def line(row: Row, cell: str) -> str:
    aligns = ['left'] + ['right'] * (len(row) - 1)
    cells = [
        f'<{cell} style="text-align:{align}">{html.escape(text)}</{cell}>'
        for align, text in zip(aligns, row)
    ]
    return f'<tr>{"".join(cells)}</tr>'

  head, *body = rows
  lines = [line(head, 'th'), *(line(row, 'td') for row in body)]
  return '\n'.join(['<table>', *lines, '</table>'])


def num_bytes(count: float) -> str:
  """Returns a number of bytes as people write it: 1.2 MB is 1,200,000 bytes."""
  for unit, name in ((1e9, 'GB'), (1e6, 'MB'), (1e3, 'kB')):
    if count >= unit:
      return f'{count / unit:.2f} {name}'
  return f'{count:.0f} B'


def times(lengths: Sequence[int]) -> str:
  """Returns a shape: `'64x64'`; `''` of a scalar."""
  return 'x'.join(map(str, lengths))
