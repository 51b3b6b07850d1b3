"""What somebody meets who has installed the wheel and nothing else.

    python tests/newcomer.py README.md dist/demo_optax-0.1.0-py3-none-any.whl

Run by CI in an environment of its own, outside of the checkout.
"""

import contextlib
import importlib
import io
import pathlib
import re
import subprocess
import sys
import zipfile


def main(readme: str, wheel: str) -> None:
  """Raises if anything is not as it should be."""
  names = zipfile.ZipFile(wheel).namelist()
  assert 'demo_optax/py.typed' in names
  assert all(name.startswith(('demo_optax/', 'demo_optax-')) for name in names)
  assert not [name for name in names if 'test' in name]

  import demo_optax

  assert 'site-packages' in demo_optax.__file__, demo_optax.__file__
  for name in demo_optax.__all__:
    assert getattr(demo_optax, name) is not None
  for name in names:
    if re.fullmatch(r'demo_optax/(?:\w+/)?[a-z]\w+\.py', name):
      try:
        importlib.import_module(name[:-3].replace('/', '.'))
      except ModuleNotFoundError as error:  # of an extra
        assert error.name == 'zmq' and 'remote' in name, name
  try:
    demo_optax.Workers.remote('tcp://127.0.0.1:7077', rank=0, count=2)
  except ImportError as error:
    assert 'pip install pyzmq' in str(error)
  else:
    raise AssertionError('ZeroMQ is installed.')

  page = pathlib.Path(readme).read_text()
  block = re.search(r'```python\n(.*?)```', page, re.S)
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed):
    exec(block.group(1), {})
  losses = [
    float(loss) for loss in re.findall(r'^\d+ (\S+)$', printed.getvalue(), re.M)
  ]
  assert losses[-1] < 0.2 * losses[0], losses
  sent, received = re.search(
    r'sends (\S+) kB and receives (\S+) kB', page
  ).groups()
  bytes_of_a_step = rf'this exchange +sends +{sent} kB, receives +{received} kB'
  assert re.search(bytes_of_a_step, printed.getvalue()), printed.getvalue()

  subprocess.run([sys.executable, '-m', 'pip', 'check'], check=True)
  table = subprocess.run(
    [sys.executable, '-m', 'demo_optax', '300M', '--topk', '8'],
    check=True,
    capture_output=True,
    text=True,
  ).stdout
  assert '3.35 MB' in table, table


if __name__ == '__main__':
  main(*sys.argv[1:])
