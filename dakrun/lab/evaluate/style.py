"""The page's style sheet: light and dark, narrow and wide, on screen and on paper."""

STYLE = """
:root { --paper: #fff; --ink: #1b1f24; --dim: #57606a; --line: #d0d7de; --tint: #f4f6f8;
  --link: #0a58a8; --series-0: #0072b2; --series-1: #d55e00; --series-2: #009e73;
  --series-3: #b0508c; --series-4: #a06e00; --series-5: #3c94c8; }
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #14171a; --ink: #e4e8ec; --dim: #9aa4ae; --line: #3a4149; --tint: #1d2125;
    --link: #7db7ef; --series-0: #56a8e8; --series-1: #f0803c; --series-2: #2fc79a;
    --series-3: #e29bc6; --series-4: #e0a72e; --series-5: #a5d8ff; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0.5rem 0; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 0 0 0.5rem; }
h3 { font-size: 1rem; margin: 1rem 0 0.25rem; }
p, ul { max-width: 52rem; margin: 0.5rem 0; }
ul { padding-left: 1.25rem; }
a { color: var(--link); }
nav { line-height: 1.9; }
section { border-top: 2px solid var(--line); margin-top: 2rem; padding-top: 1.25rem; }
.notice { border: 2px solid currentColor; padding: 0.5rem 0.75rem; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: 0.25rem 1rem;
  background: var(--tint); padding: 0.75rem; margin: 1rem 0; }
.facts dt { color: var(--dim); }
.facts dd { margin: 0; min-width: 0; }
.legend, .paper, .again, summary { color: var(--dim); }
.finding, .claim { border-left: 4px solid var(--line); padding-left: 0.75rem; }
.finding { border-color: currentColor; }
p b { color: var(--ink); margin-right: 0.25rem; }
code { font: 0.9em ui-monospace, monospace; overflow-wrap: anywhere; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr));
  gap: 1.25rem; margin: 1rem 0; }
figure { margin: 0; max-width: 40rem; min-width: 0; }
figure svg { display: block; width: 100%; height: auto; font-size: 12px; fill: currentColor; }
figcaption b { display: block; }
.x { text-align: center; margin: 0; }
ul.key { list-style: none; padding: 0; margin: 0.25rem 0; display: flex; flex-wrap: wrap;
  gap: 0 1rem; font-size: 0.9rem; }
figure .key svg, b.key { display: inline-block; width: 32px; margin-right: 0.4rem;
  vertical-align: middle; text-align: center; }
.grid, .axis, .mark, .l, .line { fill: none; stroke: currentColor; }
.grid { opacity: 0.14; } .mark { stroke-dasharray: 2 2; } .line { opacity: 0.75; }
.s0 { --c: var(--series-0); } .s1 { --c: var(--series-1); } .s2 { --c: var(--series-2); }
.s3 { --c: var(--series-3); } .s4 { --c: var(--series-4); } .s5 { --c: var(--series-5); }
.l.measured, .l.predicted { stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; }
.l.predicted, rect.predicted { stroke-dasharray: 5 3; }
.p { stroke: var(--c); stroke-width: 1.4; fill: var(--paper); }
.p.measured { fill: var(--c); stroke: var(--paper); stroke-width: 0.6; }
rect.measured { fill: var(--c); } rect.predicted { fill: none; stroke: var(--c); }
.scroll { overflow-x: auto; margin: 0.75rem 0; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: 0.2rem 0.6rem; text-align: left;
  vertical-align: top; white-space: nowrap; }
td:last-child { white-space: normal; }
td.n { text-align: right; }
@media (max-width: 40rem) {
  body { padding: 0.75rem; }
  .facts { grid-template-columns: 1fr; gap: 0; }
  .facts dd { margin-bottom: 0.5rem; }
}
@media print {
  :root { --paper: #fff; --ink: #000; --dim: #333; --line: #999; --tint: #fff; --link: #000; }
  body { max-width: none; font-size: 10pt; }
  nav { display: none; }
  figure, tr, h2, .finding { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
}
"""
