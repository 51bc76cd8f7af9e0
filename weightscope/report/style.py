"""The look of a report: light and dark, phone and paper, without anything from outside."""

CSS = """
:root {
  --ink: #1f2328; --muted: #57606a; --line: #d8dee4; --page: #ffffff; --soft: #f6f8fa; --link: #0b62a3;
}
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --muted: #9aa4af; --line: #363d46; --page: #15181c; --soft: #1d2127; --link: #79b8ff; }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 17px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main, footer { max-width: 74rem; margin: 0 auto; padding: 0 1.25rem; }
main > * { max-width: 44rem; margin-left: auto; margin-right: auto; }
header { padding-top: 3.5rem; }
h1 { font-size: 2.1rem; line-height: 1.2; letter-spacing: -.015em; margin: 0 0 .75rem; }
h2 { font-size: 1.4rem; line-height: 1.3; margin-top: 3rem; padding-top: 1.25rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.1rem; margin-top: 2rem; }
.lead { font-size: 1.2rem; line-height: 1.5; color: var(--muted); margin: 0 0 2rem; }
a { color: var(--link); }
a.from {
  color: inherit; text-decoration: underline dotted var(--muted); text-underline-offset: .2em; overflow-wrap: anywhere;
}
a.from:hover, a.from:focus-visible { color: var(--link); text-decoration-style: solid; }

main > figure { margin: 2rem auto; max-width: fit-content; min-width: min(44rem, 100%); }
figcaption { max-width: 44rem; margin: .6rem auto 0; color: var(--muted); font-size: .9rem; line-height: 1.5; }
.table figcaption { margin: 0 auto .5rem; }
.source { display: block; font-size: .82rem; }
.scroll { overflow-x: auto; max-width: 100%; }
.paper { background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: 12px; }
img { display: block; max-width: 100%; height: auto; margin: 0 auto; }

table { border-collapse: collapse; font-size: .92rem; line-height: 1.4; min-width: 100%; }
th { text-align: left; font-weight: 600; border-bottom: 2px solid var(--line); vertical-align: bottom; }
th, td { padding: .45rem 1.1rem .45rem 0; }
th:last-child, td:last-child { padding-right: 0; }
td { border-bottom: 1px solid var(--line); vertical-align: top; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }

.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; }
main > .facts { margin-top: 2rem; margin-bottom: 2rem; }
.facts div { background: var(--soft); border: 1px solid var(--line); border-radius: 8px; padding: .7rem .9rem; }
dt { font-size: .82rem; color: var(--muted); line-height: 1.35; }
dd { margin: .2rem 0 0; font-size: 1.3rem; font-weight: 600; font-variant-numeric: tabular-nums; line-height: 1.3; }
pre {
  background: var(--soft); border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem; overflow-x: auto;
  font-size: .85rem; line-height: 1.5;
}
footer { margin-top: 4rem; padding-bottom: 3rem; color: var(--muted); font-size: .82rem; max-width: 46.5rem; }

@media (max-width: 40rem) {
  body { font-size: 16px; }
  header { padding-top: 2rem; }
  h1 { font-size: 1.7rem; }
  .paper { padding: 6px; }
}
@media print {
  .paper, .facts div { break-inside: avoid; }
  a.from { text-decoration: none; }
}
"""
