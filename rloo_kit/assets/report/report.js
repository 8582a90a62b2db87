/* The sections that are read from top to bottom, and the start of the page. */

/* --- header, verdict, findings --- */

function ending(run) {
  const { how, reason, steps, planned, seconds, began, ended } = run.end;
  const of = planned > 0 ? ` of ${planned.toLocaleString("en")}` : "";
  const open = `Still running, or killed: written at step ${steps}${of}`;
  const word = how === "open" ? open : how.charAt(0).toUpperCase() + how.slice(1);
  const parts = [make("b", { class: how === "failed" ? "bad" : null }, word)];
  if (how !== "open") parts.push(` after ${plural(steps, "step")}${how === "finished" ? "" : of}`);
  if (reason) parts.push(`: ${reason}`);
  if (seconds) parts.push(`, ${duration(seconds)}`);
  if (began) parts.push(` \u00b7 ${instant(began)} to ${instant(ended)}`);
  return make("p", { class: "ending" }, parts);
}

function verdictOf(run, place) {
  const facts = run.facts.map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  return make("div", { class: "verdict" },
    several ? runName(place) : null,
    make("p", { class: "said" }, run.verdict),
    ending(run),
    facts.length ? make("dl", { class: "facts" }, facts) : null);
}

function showHeader() {
  const title = several ? `${plural(runs.length, "run")} compared` : runs[0].name;
  byId("kind").textContent = several ? "Comparison" : "Run report";
  put(byId("name"), title);
  byId("version").textContent = data.version;
  document.body.classList.toggle("several", several);
  byId("verdicts").append(make("div", { class: "verdicts" }, runs.map(verdictOf)));
}

function findingOf(finding, level) {
  const { kind, reward, evidence, why, remedy, settings, command } = finding;
  const parts = [["seen", evidence], ["why", why], ["do", remedy]];
  if (settings.length) parts.push(["set", settings.map(copyable)], ["try", copyable(command)]);
  return make("article", { class: `finding ${finding.level}` },
    make(level, {}, reward ? `${kind} (${reward})` : kind, make("span", { class: "level" }, finding.level)),
    make("dl", {}, parts.map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]).flat()));
}

const NOTHING_WRONG = "The doctor found no fault in this run.";
const NOTHING_SEEN = "The doctor found no fault in the steps before the run ended.";
const NOTHING_KNOWN = "The doctor needs at least two steps.";

function showFindings() {
  runs.forEach((run, place) => {
    const parts = run.findings.map((finding) => findingOf(finding, several ? "h4" : "h3"));
    const calm = !run.findings.length;
    const early = ["failed", "stopped"].includes(run.end.how);
    const said = run.end.rows < 2 ? NOTHING_KNOWN : early ? NOTHING_SEEN : NOTHING_WRONG;
    byId("finding-list").append(make("div", {}, several ? make("h3", {}, runName(place)) : null,
      calm ? make("p", { class: "calm" }, said) : null,
      parts.length ? make("div", { class: "findings" }, parts) : null));
  });
}

/* --- before and after --- */

const SIGNS = {
  rose: "more than chance",
  fell: "more than chance",
  chance: "may be chance",
  same: "unchanged",
};
const NOT_SCORED = "No held-out prompts were scored: set data.held_out to compare the model before and after training.";

/** From the ring (before) to the dot (after), with the standard error as a whisker. */
function shift(row) {
  if (row.before == null || row.after == null) return "";
  const values = [row.before, row.after, row.after - (row.error || 0), row.after + (row.error || 0)];
  const unit = Math.min(row.before, row.after) >= 0 && Math.max(row.before, row.after) <= 1;
  const [low, high] = unit ? [0, 1] : [Math.min(...values), Math.max(...values)];
  const x = (value) => 8 + (164 * (Math.min(high, Math.max(low, value)) - low)) / (high - low || 1);
  const side = sideOf(row.after - row.before);
  const line = (attributes) => draw("line", { y1: 11, y2: 11, stroke: "currentColor", ...attributes });
  return draw("svg", { class: `shift ${side}`, viewBox: "0 0 180 22", "aria-hidden": "true" },
    line({ x1: 8, x2: 172, "stroke-width": 1, opacity: 0.3 }),
    line({ x1: x(row.before), x2: x(row.after), "stroke-width": 2.5 }),
    line({ x1: x(values[2]), x2: x(values[3]), "stroke-width": 7, opacity: 0.3 }),
    draw("circle", { class: "ring", cx: x(row.before), cy: 11, r: 4.5 }),
    draw("circle", { cx: x(row.after), cy: 11, r: 5, fill: "currentColor" }));
}

function difference(row) {
  if (row.before == null || row.after == null) return "\u2013";
  const error = row.error ? ` \u00b1 ${fixed(row.error, 3)}` : "";
  return make("span", { class: sideOf(row.after - row.before) },
    signed(row.after - row.before, 3) + error);
}

function heldOutTable(run) {
  const { rewards, before, after } = run.held_out;
  const rows = rewards.map((row) => [
    row.name,
    ...[fixed(row.before, 3), fixed(row.after, 3), difference(row)].map((number) => ({ number })),
    shift(row),
    SIGNS[row.change] || "not scored again",
  ]);
  if (before?.mean_length != null) {
    const [old, now] = [before.mean_length, after?.mean_length];
    const moved = now == null ? "\u2013" : signed(now - old, 1);
    const numbers = [fixed(old, 1), fixed(now, 1), moved].map((number) => ({ number }));
    rows.push(["mean length, tokens", ...numbers, "", ""]);
  }
  const count = before?.num_prompts ?? after?.num_prompts;
  const prompts = count == null ? "held-out prompts"
    : `${plural(count, "held-out prompt")}, none of them trained on; \u00b1 one standard error`;
  const head = ["reward", "before", "after", "difference", "shift", "is it chance?"];
  return table(`Mean rewards on ${prompts}`, head, rows, "shifts");
}

function comparedTable() {
  const names = [...new Set(runs.flatMap((run) => run.held_out.rewards.map((row) => row.name)))];
  const cell = (run, name) => {
    const row = run.held_out.rewards.find((one) => one.name === name);
    if (!row) return "\u2013";
    const chance = make("span", { class: "soft" }, SIGNS[row.change] || "not scored again");
    return make("span", {}, `${fixed(row.before, 3)} \u2192 ${fixed(row.after, 3)} `, difference(row),
      make("br"), chance, shift(row));
  };
  const head = ["reward", ...runs.map((run) => run.name)];
  const rows = names.map((name) => [name, ...runs.map((run) => cell(run, name))]);
  return table("Mean rewards on held-out prompts, before and after", head, rows);
}

function sampleSide(title, sample) {
  const rewards = Object.entries(sample.rewards).map(([name, value]) =>
    make("span", {}, `${name} ${format(value)}`));
  return make("div", {}, make("h4", {}, title, rewards), completionText(sample));
}

function samplePair({ prompt, before, after }) {
  const sides = [sampleSide("before", before), after ? sampleSide("after", after) : null];
  return make("article", { class: "pair" },
    putPrompt(make("div", { class: "prompt" }), prompt), make("div", { class: "two" }, sides));
}

function showSamples() {
  const { pairs, total } = runs[Number(byId("sample-run").value)].samples;
  const all = byId("all-samples").checked;
  byId("all-samples-label").textContent = `Show all samples on this page: ${pairs.length} of ${total}`;
  const shown = pairs.slice(0, all ? pairs.length : SAMPLES).map(samplePair);
  byId("samples").replaceChildren(make("div", { class: "pairs" }, shown));
}

function showHeldOut() {
  const scored = runs.some((run) => run.held_out.rewards.length);
  const parts = several ? comparedTable() : heldOutTable(runs[0]);
  byId("held-out-table").append(scored ? parts : make("p", { class: "calm" }, NOT_SCORED));
  const withSamples = runs.map((run, place) => [place, run.name])
    .filter(([place]) => runs[place].samples.pairs.length);
  byId("samples-part").hidden = !withSamples.length;
  if (!withSamples.length) return;
  fillSelect(byId("sample-run"), withSamples);
  byId("sample-run").addEventListener("change", showSamples);
  byId("all-samples").addEventListener("change", showSamples);
  showSamples();
}

/* --- settings --- */

function settingDifferences() {
  const names = [...new Set(runs.flatMap((run) => run.config.map((row) => row.name)))];
  const valueOf = (run, name) => run.config.find((row) => row.name === name)?.value ?? "\u2013";
  const values = (name) => runs.map((run) => valueOf(run, name));
  const differing = names.filter((name) => name !== "output_dir" && new Set(values(name)).size > 1);
  if (!differing.length) return make("p", { class: "calm" }, "All settings are the same.");
  return table("Settings in which the runs differ", ["setting", ...runs.map((run) => run.name)],
    differing.map((name) => [name, ...values(name)]), "settings-table");
}

function settingsTable(caption, head, rows) {
  return rows.length ? table(caption, head, rows, "settings-table") : null;
}

function configOf(run) {
  const rows = run.config.map((row) => ({ differs: row.differs, cells: [row.name, row.value, row.default] }));
  const head = ["setting", "value", "default"];
  const differing = rows.filter((row) => row.differs);
  return make("div", {},
    settingsTable("Settings that differ from their defaults", head, differing),
    make("details", { hidden: !rows.length },
      make("summary", {}, `All ${rows.length} settings`),
      settingsTable("The whole run file, with differences marked", head, rows)));
}

function madeWith(run) {
  return make("div", { class: "made-with" },
    settingsTable("Hardware and versions", ["what", "value"], run.environment));
}

function settingsOf(run) {
  const parts = [
    make("p", { class: "hint" }, "The same settings and seed, in a new folder:"),
    copyable(run.command),
    make("div", { class: "setting-columns" }, configOf(run), madeWith(run)),
  ];
  return several ? make("details", {}, make("summary", {}, run.name), parts) : make("div", {}, parts);
}

function showSettings() {
  if (several) byId("setting-differences").append(settingDifferences());
  put(byId("setting-parts"), runs.map(settingsOf));
}

/* --- light, dark, paper --- */

const darkByDefault = matchMedia("(prefers-color-scheme: dark)");
const themeByDefault = () => (darkByDefault.matches ? "dark" : "light");
const isDark = () => (document.documentElement.dataset.theme || themeByDefault()) === "dark";

function recolour() {
  readPalette();
  for (const { u } of charts) u.redraw(false);
  byId("theme").textContent = isDark() ? "Light colours" : "Dark colours";
}

function watchTheme() {
  byId("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    recolour();
  });
  darkByDefault.addEventListener("change", recolour);
  let before;
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme;
    document.documentElement.dataset.theme = "light";
    recolour();
    for (const { u } of charts) u.setSize(PRINTED);
  });
  addEventListener("afterprint", () => {
    if (before) document.documentElement.dataset.theme = before;
    else delete document.documentElement.dataset.theme;
    recolour();
    charts.forEach(fit);
  });
}

readPalette();
showHeader();
showFindings();
showHeldOut();
showCurves();
showGroups();
showSettings();
watchTheme();
recolour();
