"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const form = document.getElementById("filters"), list = document.getElementById("list");
const make = (tag, look, text) => Object.assign(document.createElement(tag), {className: look || "", textContent: text ?? ""});
const percent = share => Number.isFinite(share) ? Math.round(100 * share) + " %" : "none";
const sorted = values => [...new Set(values)].sort((a, b) => a.localeCompare(b, undefined, {numeric: true}));

function choice(name, title, options) {
  const label = make("label", "", title), select = make("select");
  for (const [value, text] of options) select.append(Object.assign(make("option", "", text), {value}));
  select.name = name;
  label.append(select);
  form.append(label);
}
choice("solved", "Solved by", [["", "anyone or none"], ["only A", "only A"], ["only B", "only B"], ["both", "both"], ["neither", "neither"]]);
choice("sure", "Difference", [["", "any"], ["yes", "sure"], ["more", "sure with more seeds"]]);
choice("seed", "Seed", [["", "all"], ...data.seeds.map(seed => [String(seed), String(seed)])]);
const numbers = [...new Set(data.problems.flatMap(one => one.runs.map(run => run[2])))].sort((a, b) => a - b);
choice("sample", "Sample", [["", "all sampled"], ...numbers.map(n => [String(n), n < 0 ? "greedy" : String(n + 1)])]);
const tags = sorted(data.problems.flatMap(one => Object.keys(one.tags)));
for (const tag of tags) {
  const values = sorted(data.problems.map(one => one.tags[tag]).filter(value => value !== undefined));
  choice("tag:" + tag, tag, [["", "all"], ...values.map(value => [value, value])]);
}
const families = sorted(data.problems.map(one => one.family).filter(Boolean));
if (families.length) choice("family", "Family", [["", "all"], ...families.map(value => [value, value])]);
const label = make("label", "wide", "Text in problem or completions"), search = make("input");
Object.assign(search, {type: "search", name: "text"});
label.append(search);
form.append(label);

function chosen(one, seed, sample) {
  return one.runs.filter(run => (!seed || run[1] === +seed) && (sample ? run[2] === +sample : run[2] >= 0));
}
function state(runs) {
  const shares = [0, 1].map(side => {
    const own = runs.filter(run => run[0] === side);
    return own.filter(run => run[3]).length / own.length;
  });
  return [["neither", "only B"], ["only A", "both"]][+(shares[0] >= 0.5)][+(shares[1] >= 0.5)].split().concat(shares);
}
function sureness(one) {
  if (one.p < 0.05) return "sure (p " + one.p.toPrecision(2) + ")";
  return one.needed === null ? "" : one.needed > 200 ? "sure with > 200 seeds" : "sure with " + one.needed + " seeds";
}
function fill(details, one, runs) {
  const facts = ["reference answer " + one.gold, ...Object.entries(one.tags).map(([tag, value]) => tag + " " + value)];
  if (one.family) facts.push("family " + one.family);
  const about = make("ul", "facts more"), two = make("div", "two");
  about.append(...[...facts, one.id].map(fact => make("li", "", fact)));
  [data.a, data.b].forEach((arm, side) => {
    const column = make("div");
    column.append(make("h3", "", "AB"[side] + ": " + arm));
    for (const [, seed, sample, right, tokens, cut, runOn, answer, text] of runs.filter(run => run[0] === side)) {
      const box = make("div", "side"), title = make("h4");
      title.append(make("span", "", "seed " + seed + ", " + (sample < 0 ? "greedy" : "sample " + (sample + 1))));
      title.append(make("span", "verdict " + (right ? "right" : "wrong"), right ? "\u2713 right" : "\u2717 wrong"));
      const said = ["answer " + (answer ?? "none"), tokens + " tokens", ...(cut ? ["cut"] : []), ...(runOn ? ["runs on"] : [])];
      box.append(title, make("pre", "", text), make("p", "", said.join(" \u00b7 ")));
      column.append(box);
    }
    two.append(column);
  });
  details.append(about, two);
}
function show() {
  const want = Object.fromEntries(new FormData(form)), text = want.text.toLowerCase(), shown = [];
  for (const one of data.problems) {
    const runs = chosen(one, want.seed, want.sample);
    const [solved, a, b] = runs.length ? state(runs) : [one.solved, ...one.shares];
    const sure = one.p < 0.05 ? "yes" : one.needed === null ? "" : "more";
    if ((want.solved && want.solved !== solved) || (want.sure && want.sure !== sure)) continue;
    if ((want.family && want.family !== one.family) || tags.some(tag => want["tag:" + tag] && want["tag:" + tag] !== one.tags[tag])) continue;
    if (text && ![one.prompt, ...runs.map(run => run[8])].some(part => part.toLowerCase().includes(text))) continue;
    const details = make("details", "problem"), summary = make("summary");
    summary.append(make("span", "who " + solved.replace(" ", "-"), solved));
    summary.append(make("span", "shares", "A " + percent(a) + ", B " + percent(b)));
    summary.append(make("span", "text", one.prompt || one.id), make("span", "sure", sureness(one)));
    details.append(summary);
    details.addEventListener("toggle", () => details.childElementCount > 1 || fill(details, one, runs));
    shown.push(details);
  }
  list.replaceChildren(...shown);
  document.getElementById("count").textContent = shown.length + " of " + data.problems.length + " problems; a click shows the completions.";
}
const count = test => data.problems.filter(test).length, sure = count(one => one.p < 0.05);
const next = Math.min(...data.problems.filter(one => one.p >= 0.05 && one.needed).map(one => one.needed));
document.getElementById("words").textContent = "Of " + data.problems.length + " test problems: "
  + ["only A", "only B", "both", "neither"].map(name => name + " " + count(one => one.solved === name)).join(", ")
  + ". The arms' accuracy differs on " + count(one => one.shares[0] !== one.shares[1]) + " of them; over " + data.seeds.length
  + (data.seeds.length === 1 ? " seed, " : " seeds, ") + sure + (sure === 1 ? " of these differences is sure." : " of these differences are sure.")
  + (Number.isFinite(next) ? " If further seeds differed as these did, " + next + " seeds would confirm the next." : "");
form.addEventListener("input", show);
form.addEventListener("submit", event => event.preventDefault());
show();
