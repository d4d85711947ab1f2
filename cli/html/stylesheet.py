"""The style of every HTML page: for light and dark screens, for phones, for paper."""

STYLESHEET = """
:root { color-scheme: light dark;
  --page: #ffffff; --ink: #1c2126; --soft: #5b6570; --line: #dde2e7; --panel: #f5f7f9;
  --good: #1a7f45; --good-soft: #e7f5ec; --bad: #b42318; --bad-soft: #fdecea; --care: #8a5a00; --care-soft: #fdf3dc; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14181c; --ink: #e6e9ec; --soft: #9aa5b0; --line: #2c343c; --panel: #1c2228;
  --good: #5fd08c; --good-soft: #14301f; --bad: #ff8a80; --bad-soft: #3a1715; --care: #f0c060; --care-soft: #332709; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5; font-size: 15px;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", "DejaVu Sans", Arial, sans-serif; }
main { max-width: 860px; margin: 0 auto; padding: 36px 24px 28px; }
h1 { font-size: 27px; line-height: 1.2; margin: 2px 0 14px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 34px 0 8px; padding-top: 12px; border-top: 1px solid var(--line); }
p { margin: 6px 0; }
.kind { color: var(--soft); font-size: 12px; letter-spacing: 0.08em; text-transform: uppercase; margin: 0; }
.lead, .note { color: var(--soft); }
.note { font-size: 13px; }
.badge { display: inline-block; font-weight: 600; padding: 3px 11px; border-radius: 5px; margin: 0 8px 0 0; }
.good { color: var(--good); background: var(--good-soft); }
.bad { color: var(--bad); background: var(--bad-soft); }
.care { color: var(--care); background: var(--care-soft); }
.tiles { display: flex; flex-wrap: wrap; gap: 1px; margin: 16px 0 10px;
  background: var(--line); border: 1px solid var(--line); border-radius: 7px; overflow: hidden; }
.tiles div { background: var(--page); padding: 10px 14px; flex: 1 1 auto; }
.tiles dt { color: var(--soft); font-size: 12px; }
.tiles dd { margin: 0; font-size: 19px; white-space: nowrap; font-weight: 600; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tiles small { display: block; font-size: 12px; font-weight: 400; color: var(--soft); }
.says { list-style: none; margin: 12px 0; padding: 0; }
.says li { border-left: 3px solid; padding: 7px 12px; margin: 7px 0; border-radius: 0 5px 5px 0; }
.says b { margin-right: 5px; }
.says span { color: var(--ink); overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: 8px 0; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th .swatch { display: block; width: auto; height: 4px; margin: 0 0 4px; }
th { color: var(--soft); font-weight: 500; font-size: 12.5px; vertical-align: bottom; }
td { vertical-align: top; }
th, td { padding: 4px 14px 4px 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:last-child, td:last-child { padding-right: 0; }
.text { text-align: left; }
.words { text-align: left; white-space: normal; overflow-wrap: break-word; }
tr.strong td { font-weight: 600; }
td.gap { text-align: left; color: var(--soft); }
figure { margin: 12px 0 14px; }
.side { display: flex; flex-wrap: wrap; gap: 0 56px; }
.facts td { text-align: left; }
.facts td:first-child { text-align: right; font-weight: 600; }
svg { display: block; width: 100%; height: auto; font-family: inherit; }
svg text { fill: currentColor; }
svg path[stroke="#222"] { stroke: currentColor; }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 7px; }
pre, code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 12.5px; }
pre { background: var(--panel); border-radius: 6px; padding: 11px 14px; margin: 8px 0; white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: 10px 0; }
summary { cursor: pointer; color: var(--soft); }
footer { color: var(--soft); font-size: 12.5px; margin-top: 34px; padding-top: 10px; border-top: 1px solid var(--line); }
@media (max-width: 640px) { main { padding: 22px 16px; } figure { overflow-x: auto; } figure svg { min-width: 560px; } }
@media print {
  :root { color-scheme: light; --page: #ffffff; --ink: #000000; --soft: #444444; --line: #cccccc; --panel: #f5f5f5;
    --good: #14612f; --good-soft: #ffffff; --bad: #8f1b12; --bad-soft: #ffffff; --care: #6b4700; --care-soft: #ffffff; }
  body { font-size: 10.5pt; -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  main { max-width: none; padding: 0; }
  .badge { padding: 0; }
  h2 { break-after: avoid; margin-top: 20px; }
  figure, tr, .tiles, .says li { break-inside: avoid; }
  .wide { overflow: visible; }
  details:not([open]) { display: none; }
  @page { margin: 16mm; }
}
"""
