"""Define how a report looks."""

from __future__ import annotations

#: Style sheet of a page. Tables and pictures that scroll sideways have shadows at the edges where there is more.
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto; max-width: 1280px;
  padding: 0 16px 48px; }
h1 { font-size: 1.6rem; margin: 1.2rem 0 .4rem; overflow-wrap: break-word; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid #ccc; }
h3 { font-size: 1.05rem; margin: 1.4rem 0 .4rem; }
p, li, dd, figcaption { max-width: 75ch; overflow-wrap: break-word; }
.state { font-size: 1.1rem; padding: .5rem .8rem; border-left: 6px solid #666; background: #f4f4f4;
  overflow-wrap: break-word; }
.complete { border-color: #009e73; } .uneven { border-color: #d9a400; } .failed, .silent { border-color: #b00020; }
.stopped { border-color: #d55e00; } .running { border-color: #0072b2; }
figure { margin: 1rem 0; } figcaption { color: #444; font-size: .92rem; margin-top: .3rem; }
svg { display: block; width: 100%; height: auto; max-width: 760px; }
svg text { font-family: system-ui, sans-serif; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 500px), 1fr)); gap: 0 32px; }
.wide { overflow-x: auto; margin: .8rem 0; background:
  linear-gradient(90deg, #fff 40%, #fff0) 0 0 / 48px 100% no-repeat local,
  linear-gradient(-90deg, #fff 40%, #fff0) 100% 0 / 48px 100% no-repeat local,
  linear-gradient(90deg, #0005, #0000) 0 0 / 16px 100% no-repeat scroll,
  linear-gradient(-90deg, #0005, #0000) 100% 0 / 16px 100% no-repeat scroll; }
table { border-collapse: collapse; font-size: .92rem; }
caption { text-align: left; font-weight: 600; padding: .2rem 0; }
th, td { text-align: left; vertical-align: top; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #e4e4e4; }
th { font-weight: 600; } tbody th { font-weight: 500; }
td { font-variant-numeric: tabular-nums; min-width: 5ch; max-width: 75ch; }
thead th { vertical-align: bottom; }
th.n, td.n { text-align: right; min-width: 4ch; } td.n, th[scope=row] { white-space: nowrap; }
td.t { min-width: 24ch; }
tbody th[scope=row] { min-width: 4ch; }
.facts th[scope=row], .facts td { white-space: normal; min-width: 0; }
.title { font-weight: 600; margin: .8rem 0 0; } .title + .wide { margin-top: 0; }
dl { font-size: .92rem; margin: .4rem 0; } dt { font-weight: 600; } dd { margin: 0 0 .3rem 1.2rem; }
nav ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; }
.long svg { min-width: 640px; }
.pictures > * { min-width: 0; }
.key { list-style: none; padding: 0; margin: .4rem 0; display: flex; flex-wrap: wrap; gap: .1rem 1.2rem;
  font-size: .92rem; }
.spot { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em; }
.replicas { display: flex; flex-wrap: wrap; gap: 12px 20px; margin: .6rem 0; }
.replica { border: 1px solid #bbb; border-collapse: separate; border-spacing: 6px; border-radius: 6px; }
.replica th, .replica td { border: 0; padding: 0 .2rem; white-space: nowrap; min-width: 0; font-size: .85rem; }
.ranks { display: flex; flex-wrap: wrap; gap: 6px; }
.rank { display: inline-block; border: 3px solid; border-radius: 4px; padding: .1rem .35rem; white-space: nowrap;
  font-size: .85rem; }
details { margin: 1rem 0; border: 1px solid #ccc; border-radius: 6px; padding: 0 1rem; }
summary { padding: .6rem 0; cursor: pointer; }
"""
