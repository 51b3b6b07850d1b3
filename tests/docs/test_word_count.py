"""The documents stay short: their words are counted, as `wc -w` does."""

import re

from helpers import ROOT

# May only fall.
LIMIT = 25_300
PAGES = [
  *ROOT.glob('*.md'),
  *(ROOT / 'docs').glob('*.md'),
  *(ROOT / 'benchmarks').glob('*.md'),
]


def test_the_documents_are_short():
  words = {str(page): len(page.read_text().split()) for page in PAGES}
  assert sum(words.values()) <= LIMIT, sorted(words.items(), key=lambda w: w[1])


def test_links_lead_to_pages_and_headings():
  """Between the documents; the site's builder checks them as well."""
  for page in PAGES:
    text = page.read_text()
    for link in re.findall(r'\]\(([^)\s]+)\)', text):
      if link.startswith('http'):
        continue
      name, _, heading = link.partition('#')
      target = (page.parent / name).resolve() if name else page
      assert target.exists(), (page.name, link)
      if heading and target.suffix == '.md':
        assert heading in anchors(target.read_text()), (page.name, link)


def anchors(text):
  """Of headings, as GitHub makes them."""
  text = re.sub(r'(?s)```.*?```', '', text)
  titles = re.findall(r'^#+ (.*)$', text, re.M)
  kept = [re.sub(r'[^\w\- ]', '', title.lower()) for title in titles]
  return {title.replace(' ', '-') for title in kept}
