"use strict";
const {coordinates, bars, axes, metric} = JSON.parse(document.getElementById("data").textContent);
const safe = text => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const cut = text => text.length > 14 ? text.slice(0, 12) + "\u2026" : text;
const broken = name => (name.match(/.{1,14}(?:[_./ ]|$)|.{1,14}/g) || []).map(safe).join("<br>");
const ends = [[221, 143, 70], [0, 83, 138]];  // of the lowest and the highest value
const color = share => `rgb(${ends[0].map((low, i) => Math.round(low + share * (ends[1][i] - low)))})`;
const room = {title: undefined, paper_bgcolor: "#fff", plot_bgcolor: "#fff", font: {family: "inherit", color: "#1d2126"}};
const calm = {responsive: true, displaylogo: false, modeBarButtons: [["toImage"]]};

const lines = coordinates.data.map(one => one.customdata
  ? {...one, opacity: 0.7, line: {...one.line, width: 1.8, color: color(one.y[0])},
     customdata: one.customdata.map(([, text], i) => [safe(i ? axes[i - 1] : metric), safe(text)])}
  : {...one, marker: {...one.marker, colorscale: [[0, color(0)], [1, color(1)]], reversescale: false,
     colorbar: {title: {text: ""}, thickness: 12}}});
const levels = coordinates.layout.annotations.map(one => ({...one, text: safe(cut(one.text)), bgcolor: "rgba(255,255,255,.8)"}));
Plotly.newPlot("coordinates", lines, {...coordinates.layout, ...room, margin: {t: 20, r: 20, b: 70, l: 80}, annotations: levels,
  xaxis: {...coordinates.layout.xaxis, ticktext: [metric, ...axes].map(broken), tickangle: 0, fixedrange: true}}, calm);

const shares = bars.data.map(one => ({...one, y: one.y.map(safe), marker: {color: color(1)},
  hovertemplate: "%{y}: %{x:.3f}<extra></extra>"}));
Plotly.newPlot("bars", shares, {...bars.layout, ...room, margin: {t: 10, r: 40, b: 50, l: 20}, bargap: 0.35,
  xaxis: {title: {text: "share of the variance"}, range: [0, 1.1], fixedrange: true},
  yaxis: {automargin: true, fixedrange: true}}, calm);
