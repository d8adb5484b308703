// What the pipelines do: the schedule, where time went, the last minutes. It asks /state.json every second.

const EVERY_MS = 1000, WHILE_ASKING_MS = 500, INTERVAL_S = 10, STALE_MS = 4000, FRAME_MS = 60;
const BUSY = ["prefill", "decode", "mixed"];
const GLYPHS = {fill_drain: "f", imbalance: "i", transfer: "x", token_return: "r", host: "h", gather: "g"};
const NAMES = {fill_drain: "fill and drain", token_return: "token return"};
const ASKS = document.documentElement.dataset.asks, WANTS_KEY = document.documentElement.dataset.wantsKey === "true";
const KNOWS = (document.documentElement.dataset.knows ?? "").split(" ");  // "thinking" and "tools", where the model has them
const KEY_NAME = "ppserve-key";
const isBusy = (kind) => BUSY.includes(kind);
const nameOf = (kind) => isBusy(kind) ? `busy: ${kind}` : NAMES[kind] ?? kind;
const calm = matchMedia("(prefers-reduced-motion: reduce)");

let readings = [];        // of the last INTERVAL_S, oldest first
let newest = null;        // the latest reading
let shown = null;         // the reading whose schedule is drawn
let paused = false, panS = 0, windowChosen = false;
let ownRequest = "";      // the name of the page's latest request: its slices are marked
let isAsking = false;     // whether that request runs

// ---- figures ------------------------------------------------------------------------------------------

/** What happened between two readings; since the start when there is no first. */
function difference(first, last) {
  const counted = (name) => last[name] - (first ? first[name] : 0);
  return {
    seconds: first ? last.now_s - first.now_s : null,
    counted,
    latency: (name) => ({
      bounds: last[name].bounds_s,
      counts: last[name].counts.map((count, i) => count - (first ? first[name].counts[i] : 0)),
    }),
    stages: last.stages.map((stage, i) => {
      const time = {};
      let wall = 0;
      for (const kind of last.kinds) {
        time[kind] = Math.max(0, stage.time_s[kind] - (first ? first.stages[i].time_s[kind] : 0));
        wall += time[kind];
      }
      for (const kind of last.kinds) time[kind] /= wall || 1;
      return time;
    }),
  };
}

/** A quantile of a cumulative histogram, linear within a bucket; null when it is empty. */
function quantile({bounds, counts}, q) {
  const total = counts.at(-1);
  if (!total) return null;
  const rank = q * total, i = counts.findIndex((count) => count >= rank);
  if (i >= bounds.length) return bounds.at(-1);
  const low = i ? bounds[i - 1] : 0, below = i ? counts[i - 1] : 0;
  return low + (bounds[i] - low) * (rank - below) / (counts[i] - below || 1);
}

const percent = (share) => `${(100 * share).toFixed(1)}%`;
const short = (n) => n >= 1e9 ? `${(n / 1e9).toFixed(1)} B` : n >= 1e6 ? `${(n / 1e6).toFixed(1)} M` : `${n}`;
const bytes = (n) => n >= 1e9 ? `${(n / 1e9).toFixed(1)} GB` : `${(n / 1e6).toFixed(n < 1e7 ? 1 : 0)} MB`;
const milliseconds = (s) => s === null ? "–" : s < 0.01 ? (1e3 * s).toFixed(1) : (1e3 * s).toFixed(0);
const busyShare = (time) => BUSY.reduce((sum, kind) => sum + time[kind], 0);
const counted = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;

function showTiles(state, change) {
  const rate = (name, digits) => change.seconds ? (change.counted(name) / change.seconds).toFixed(digits) : "–";
  const pair = (name) => {
    const seen = change.latency(name);
    return `${milliseconds(quantile(seen, 0.5))} / ${milliseconds(quantile(seen, 0.99))}`;
  };
  const tiles = [
    ["Running", state.running], ["Waiting", state.waiting],
    ["Microbatches in flight", `${state.in_flight} of ${state.microbatches}`], ["KV cache used", percent(state.kv_usage)],
    ["Tokens per second", rate("generated_tokens", 0)], ["Requests per second", rate("requests", 2)],
    ["TTFT p50 / p99, ms", pair("ttft")], ["ITL p50 / p99, ms", pair("itl")],
  ];
  byId("tiles").replaceChildren(...tiles.map(([name, value]) => {
    const tile = element("div", "", {class: "tile"});
    tile.append(element("dt", name), element("dd", String(value)));
    return tile;
  }));
}

// Its number; behind that of its replica, where there are several.
const place = (state, stage) => state.replicas.length > 1 ? `${stage.replica}.${stage.stage}` : stage.stage;

const SAID_OF = {away: " is away", loading: " loads its weights", waiting: " waits for the others", ready: ""};
const isAway = (stage) => stage.state === "away" || stage.state === "loading";

function showStages(state, change) {
  const group = byId("stages");
  while (group.children.length > state.stages.length) group.lastChild.remove();
  state.stages.forEach((stage, i) => {
    if (!group.children[i]) group.append(newStage(state.kinds));
    const row = group.children[i], [label, bar, share] = row.children, time = change.stages[i];
    row.classList.toggle("dead", isAway(stage));
    label.children[0].textContent = `Stage ${place(state, stage)}${SAID_OF[stage.state]}`;
    const again = stage.restarts ? `, started again ${stage.restarts}×` : "";
    label.children[1].textContent = `layers ${stage.layers}, ${short(stage.num_parameters)}, ${stage.device}${again}`;
    label.children[2].textContent = `weights ${bytes(stage.weight_bytes)}, KV cache ${bytes(stage.kv_bytes)}`;
    state.kinds.forEach((kind, k) => {
      bar.children[k].style.width = percent(time[kind]);
      bar.children[k].title = `${nameOf(kind)} ${percent(time[kind])}`;
    });
    const said = state.kinds.filter((kind) => time[kind] >= 0.0005).map((kind) => `${nameOf(kind)} ${percent(time[kind])}`);
    bar.setAttribute("aria-label", `Stage ${place(state, stage)}: ${said.join(", ") || "no time yet"}`);
    share.textContent = `${percent(busyShare(time))} busy`;
  });
}

function newStage(kinds) {
  const row = element("div", "", {class: "stage"}), label = element("div");
  label.append(element("b"), element("small"), element("small"));
  const bar = element("div", "", {class: "bar", role: "img"});
  bar.append(...kinds.map((kind) => {
    const part = element("span");
    part.style.background = `var(--${kind})`;
    return part;
  }));
  row.append(label, bar, element("div", "", {class: "percent"}));
  return row;
}

function swatch(kind) {
  const colour = element("i", "", {"aria-hidden": "true"});
  colour.style.background = `var(--${kind})`;
  return colour;
}

function showLegend(state) {
  if (byId("legend").children.length) return;
  const entries = state.kinds.map((kind) => [kind, `${nameOf(kind)}${GLYPHS[kind] ? ` (${GLYPHS[kind]})` : ""}`]);
  if (ASKS) entries.unshift(["own", "your request"]);
  byId("legend").append(...entries.map(([kind, text]) => {
    const entry = element("li");
    entry.append(swatch(kind), text);
    return entry;
  }));
  for (const kind of state.kinds) {
    const name = element("dt"), {what, helps} = state.meanings[kind];
    name.append(swatch(kind), nameOf(kind));
    byId("meanings").append(name, element("dd", helps ? `${what}; ${helps}.` : `${what}.`));
  }
}

function showShares(state, change) {
  const [head, body] = byId("shares").children;
  head.firstElementChild.replaceChildren(...["stage", ...state.kinds.map(nameOf)].map((n) => element("th", n, {scope: "col"})));
  body.replaceChildren(...change.stages.map((time, i) => {
    const row = element("tr");
    row.append(element("th", `stage ${place(state, state.stages[i])}`, {scope: "row"}), ...state.kinds.map((k) => element("td", percent(time[k]))));
    return row;
  }));
}

// ---- the last minutes ---------------------------------------------------------------------------------

/** A point of the server's history: when it ended in seconds, and behind that the value of each line; null = none. */
const LINES = [
  {title: "Tokens per second", text: (value) => value.toFixed(0)},
  {title: "Time to first token, ms", text: milliseconds},
  {title: "Requests that wait", text: (value) => `${value}`},
  {title: "Bubbles, of the time with work", text: percent},
];

function showHistory(points) {
  if (!points.length) return;
  const end = points.at(-1)[0], longS = Math.max(30, Math.ceil((end - points[0][0]) / 30) * 30);
  byId("history-long").textContent = longS < 120 ? `(${longS} s)` : `(${+(longS / 60).toFixed(1)} min)`;
  const group = byId("history");
  LINES.forEach(({title, text}, line) => {
    if (!group.children[line]) group.append(newLine(title));
    const [caption, picture] = group.children[line].children, now = points.at(-1)[line + 1];
    const values = points.map((point) => point[line + 1]), most = Math.max(...values.filter((value) => value !== null), 0);
    const isKnown = values.some((value) => value !== null);
    caption.lastChild.textContent = isKnown ? `${now === null ? "–" : text(now)}, at most ${text(most)}` : "–";
    picture.setAttribute("aria-label", `${title}: now ${caption.lastChild.textContent}`);
    picture.firstChild.setAttribute("d", points.map(([at], i) => {
      if (values[i] === null) return "";
      const place = `${(300 * (1 - (end - at) / longS)).toFixed(1)} ${(49 - 47 * values[i] / (most || 1)).toFixed(1)}`;
      return i && values[i - 1] !== null ? `L${place}` : `M${place}h0`;  // a point alone is a dot
    }).join(""));
  });
}

function newLine(title) {
  const figure = element("figure"), caption = element("figcaption"), space = "http://www.w3.org/2000/svg";
  const picture = document.createElementNS(space, "svg");
  for (const [name, value] of Object.entries({viewBox: "0 0 300 50", preserveAspectRatio: "none", role: "img"})) picture.setAttribute(name, value);
  picture.append(document.createElementNS(space, "path"));
  caption.append(element("span", title), element("span"));
  figure.append(caption, picture);
  return figure;
}

// ---- the schedule -------------------------------------------------------------------------------------

const windowS = () => Number(byId("window").value);

/** Until somebody chooses: so long that one step can be told from the next. */
function chooseWindow(state) {
  const busy = state.stages.flatMap((stage) => stage.spans.filter(([kind]) => isBusy(state.kinds[kind])).map((span) => span[2]));
  if (windowChosen || busy.length < 8) return;
  busy.sort((a, b) => a - b);
  const longUs = busy[busy.length >> 1] * byId("schedule").clientWidth / 9;
  const fitting = [...byId("window").options].filter((option) => 1e6 * Number(option.value) <= longUs);
  byId("window").value = (fitting.at(-1) ?? byId("window").options[0]).value;
}

/** How long before the reading the picture ends, in µs. The picture moves: in real time where the window is a second
or more, else through as much time as it shows, slowly. */
function endOf(state) {
  // The latest moments are settled at some stages before others: the picture ends with what is known of all.
  const settledUs = Math.max(0, ...state.stages.filter((s) => s.spans.length).map((s) => s.spans.at(-1)[1] - s.spans.at(-1)[2]));
  if (paused || calm.matches) return settledUs + 1e6 * panS;
  const elapsed = Math.min(1.5, (performance.now() - state.arrivedMs) / (isAsking ? WHILE_ASKING_MS : EVERY_MS));
  if (windowS() >= 1) return 1.3e6 - 1e3 * (performance.now() - state.arrivedMs);
  return settledUs + 1e6 * windowS() * Math.max(0, 1 - elapsed);
}

function draw() {
  const canvas = byId("schedule"), state = shown;
  if (!state) return;
  const rowPx = 44, axisPx = 22, leftPx = 34, scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = rowPx * state.stages.length + axisPx;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
  }
  const paint = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  const colours = Object.fromEntries([...state.kinds, "own", "on-busy", "paper", "ink", "soft", "dark", "on-dark"]
    .map((name) => [name, style.getPropertyValue(`--${name}`)]));
  paint.setTransform(scale, 0, 0, scale, 0, 0);
  paint.clearRect(0, 0, width, height);
  const windowUs = 1e6 * windowS(), endUs = endOf(state);
  const xOf = (beforeUs) => leftPx + (width - leftPx) * (1 - (beforeUs - endUs) / windowUs);
  paint.textBaseline = "middle";
  paint.font = "12px system-ui, sans-serif";
  let steps = 0, own = 0;
  state.stages.forEach((stage, row) => {
    const top = row * rowPx + 6, full = rowPx - 12, ownSteps = state.ownSteps[stage.replica] ?? new Set();
    paint.fillStyle = colours.idle;
    paint.fillRect(leftPx, top + full / 2 - 1, width - leftPx, 2);
    for (const [number, beforeUs, longUs, step] of stage.spans) {
      const from = Math.max(xOf(beforeUs), leftPx), to = Math.min(xOf(beforeUs - longUs), width), kind = state.kinds[number];
      if (to <= leftPx || from >= width) continue;
      const busy = isBusy(kind), wide = to - from, isOwn = busy && ownSteps.has(step);
      paint.fillStyle = colours[kind];
      if (busy) {
        steps += 1;
        paint.fillRect(from, top, Math.max(wide - 1, 0.5), full);
      } else {
        paint.fillRect(from, top + full / 3, Math.max(wide - 0.5, 0.3), full / 3);
      }
      if (isOwn) {
        own += 1;
        paint.fillStyle = colours.own;
        paint.fillRect(from, top - 4, Math.max(wide - 1, 1), 5);
        paint.fillRect(from, top + full - 1, Math.max(wide - 1, 1), 5);
      }
      label(paint, busy ? `${place(state, stage)}F${step}` : GLYPHS[kind], from, wide, top + full / 2, colours[busy ? "on-busy" : "paper"]);
    }
    if (isAway(stage)) {
      paint.fillStyle = colours.dark;
      paint.fillRect(leftPx, top - 4, width - leftPx, full + 8);
      label(paint, `stage ${place(state, stage)}${SAID_OF[stage.state]}`, leftPx, width - leftPx, top + full / 2, colours["on-dark"]);
    }
    paint.fillStyle = colours.ink;
    paint.textAlign = "left";
    paint.fillText(`S${place(state, stage)}`, 8, top + full / 2);
  });
  paint.fillStyle = colours.soft;
  drawAxis(paint, windowUs, endUs, (width - leftPx), leftPx, height - axisPx / 2);
  return {steps, own};
}

/** Say in words what is drawn: not with every frame. */
function describeSchedule(drawn) {
  if (!drawn) return;
  const {steps, own} = drawn, mine = own ? `, ${own} of them with your request` : "";
  byId("schedule-text").textContent = steps
    ? `${counted(steps, "computation")} of ${counted(shown.stages.length, "stage")} in ${windowS()} s${mine}${paused ? ", paused" : ""}.`
    : "Nothing was computed in this stretch of time.";
  const slowly = EVERY_MS / 1000 / windowS();
  byId("speed").textContent = paused || calm.matches ? "" : slowly > 1 ? `in slow motion, ${+slowly.toFixed(0)}× slower` : "in real time";
}

function redraw() {
  describeSchedule(draw());
}

function label(paint, text, from, wide, y, colour) {
  if (wide < 9 || paint.measureText(text).width > wide - 4) return;
  paint.fillStyle = colour;
  paint.textAlign = "center";
  paint.fillText(text, from + wide / 2, y);
}

/** Times before the picture's right edge, and how long ago that edge was. */
function drawAxis(paint, windowUs, endUs, widthPx, leftPx, y) {
  const ticks = widthPx > 500 ? 5 : 2;
  paint.textAlign = "center";
  for (let i = 1; i < ticks; i++) {
    paint.fillText(`−${+(i * windowUs / ticks / 1e3).toFixed(1)} ms`, leftPx + widthPx * (1 - i / ticks), y);
  }
  paint.textAlign = "right";
  paint.fillText(!paused || endUs < 5e5 ? "now" : `${(endUs / 1e6).toFixed(1)} s ago`, leftPx + widthPx - 6, y);
}

/** The picture moves while anything was computed in it. */
function move() {
  if (shown && !paused && !calm.matches && !document.hidden && shown.stages.some((stage) => stage.spans.length)) draw();
  setTimeout(() => requestAnimationFrame(move), FRAME_MS);
}

// ---- asking, and being asked --------------------------------------------------------------------------

function take(state) {
  const previous = newest;
  // A server that was started again counts from zero: what was read before says nothing about it.
  const fresh = !previous || state.generated_tokens < previous.generated_tokens || state.now_s < previous.now_s
    || state.stages.length !== previous.stages.length;
  byId("pipeline").hidden = false;
  state.arrivedMs = performance.now();
  state.ownSteps = (state.own ?? []).map((steps) => new Set(steps));
  newest = state;
  if (fresh) readings = [];
  const isNewSecond = !readings.length || state.now_s - readings.at(-1).now_s >= 0.9;
  readings = readings.filter((r) => state.now_s - r.now_s <= INTERVAL_S);
  if (isNewSecond) readings.push(state);
  const change = difference(readings[0] === state ? null : readings[0], state);
  byId("model").textContent = `${state.model.name}, ${short(state.model.params)} parameters, ${state.model.numbers}, `
    + (state.replicas.length > 1 ? `${state.replicas.length} replicas, ` : "")
    + counted(state.stages.length, "stage")
    + (state.stages[0].ranks.length > 1 ? ` of ${state.stages[0].ranks.length} tensor ranks` : "")
    + ` over ${state.transport}, epoch ${state.epoch}`;
  byId("interval").textContent = change.seconds ? `last ${Math.round(change.seconds)} s` : "since the start";
  byId("advice").textContent = state.advice;
  document.title = `ppserve: ${state.running} running`;
  chooseWindow(state);
  showTiles(state, change);
  showStages(state, change);
  showLegend(state);
  showShares(state, change);
  showHistory(state.history);
  showLinks(state.links);
  showAway(state);
  if (!paused) { shown = state; panS = 0; }
  redraw();
}

function showAway(state) {
  const away = state.stages.filter(isAway).map((stage) => place(state, stage));
  const gone = state.replicas.filter((replica) => !replica.serves).length;
  const which = away.length ? `${away.length === 1 ? "Stage" : "Stages"} ${away.join(", ")} ${away.length === 1 ? "is" : "are"} away` : "All stages are there again, and join";
  const others = gone < state.replicas.length ? " Another replica computes meanwhile." : " Their text goes on by itself when all stages have joined.";
  const text = gone ? `${which}; ${counted(state.waiting, "request")} ${state.waiting === 1 ? "waits" : "wait"}.${others}` : "";
  if (byId("away").textContent !== text) byId("away").textContent = text;
}

function showLinks(links) {
  const addressOf = (link, path) => {
    const [scheme, port] = link.split(":");
    return `${scheme}://${location.hostname}:${port}${path}`;
  };
  const other = ASKS ? links.metrics : links.ask;
  byId("other-view").hidden = !other;
  if (other) byId("other-view").href = addressOf(other, "/");
  byId("other-view").textContent = ASKS ? "Only the pipeline" : "Ask the model";
  if (byId("footer").children.length) return;
  const figures = ["/metrics", "/state.json"].map((path) => element("a", path, {href: addressOf(links.metrics, path)}));
  byId("footer").append("Readings: ", figures[0], " for Prometheus, ", figures[1], " for this page.");
  if (ASKS && !WANTS_KEY) byId("footer").append(" What is served here: ", element("a", "/openapi.json", {href: "/openapi.json"}), ".");
}

const UNREACHABLE = "The server does not answer. This page asks again every second, and goes on by itself.";

/** The server's own state: serving, recovering or starting as it says, else what keeps it from saying. */
function contact(text) {
  const why = byId("start").textContent;
  if (text === "unreachable" ? why !== UNREACHABLE : why === UNREACHABLE) byId("start").textContent = text === "unreachable" ? UNREACHABLE : "";
  if (byId("contact").textContent !== text) byId("contact").textContent = text;
  document.body.classList.toggle("recovering", text !== "serving" && text !== "unreachable");
  document.body.classList.toggle("lost", text === "unreachable");
}

function headersOf(more = {}) {
  const key = sessionStorage.getItem(KEY_NAME);
  return key ? {...more, authorization: `Bearer ${key}`} : more;
}

/** Ask for the state once. 503 comes from a server that is closing: its port opens when its stages have joined. */
async function look() {
  const query = ownRequest ? `?request=${encodeURIComponent(ownRequest)}` : "";
  try {
    const answer = await fetch(`/state.json${query}`, {cache: "no-store", headers: headersOf(), signal: AbortSignal.timeout(STALE_MS)});
    if (answer.status === 401) return wantKey("The server does not know this key.");
    if (answer.status === 503) return contact("stopping");
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const state = await answer.json();
    byId("start").textContent = state.start ? `Ranks: ${state.start}` : "";
    if (state.status === "starting") byId("pipeline").hidden = true;
    else take(state);
    contact(state.status);
  } catch {
    contact("unreachable");
  }
}

async function keepLooking() {
  if (WANTS_KEY && !sessionStorage.getItem(KEY_NAME)) contact("needs a key");
  else await look();
  setTimeout(keepLooking, isAsking ? WHILE_ASKING_MS : EVERY_MS);
}

function wantKey(problem) {
  sessionStorage.removeItem(KEY_NAME);
  byId("key-problem").textContent = problem;
  byId("key-form").hidden = false;
  contact("needs a key");
}

function setPaused(now) {
  paused = now;
  byId("pause").setAttribute("aria-pressed", String(paused));
  byId("pause").textContent = paused ? "Go on" : "Pause";
  if (!paused && newest) { shown = newest; panS = 0; }
  redraw();
}

function zoom(by) {
  const choice = byId("window");
  choice.selectedIndex = Math.min(Math.max(choice.selectedIndex + by, 0), choice.options.length - 1);
  windowChosen = true;
  redraw();
}

function pan(byS) {
  if (!paused) setPaused(true);
  panS = Math.max(0, panS + byS);
  redraw();
}

byId("pause").addEventListener("click", () => setPaused(!paused));
byId("window").addEventListener("change", () => { windowChosen = true; redraw(); });
byId("schedule").addEventListener("keydown", (event) => {
  const quarterS = windowS() / 4;
  const keys = {
    " ": () => setPaused(!paused), "+": () => zoom(-1), "=": () => zoom(-1), "-": () => zoom(1),
    "ArrowLeft": () => pan(quarterS), "ArrowRight": () => pan(-quarterS),
  };
  if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  keys[event.key]();
});

// One finger, or the mouse, moves the picture; two zoom by a step for every halving or doubling of their distance.
const fingers = new Map();
let spread = 0;
const distance = () => { const [a, b] = [...fingers.values()]; return Math.abs(a - b) || 1; };
byId("schedule").addEventListener("pointerdown", (event) => {
  fingers.set(event.pointerId, event.clientX);
  byId("schedule").setPointerCapture(event.pointerId);
  if (fingers.size === 2) spread = distance();
});
byId("schedule").addEventListener("pointermove", (event) => {
  if (!fingers.has(event.pointerId)) return;
  const movedPx = event.clientX - fingers.get(event.pointerId);
  fingers.set(event.pointerId, event.clientX);
  if (fingers.size === 1 && movedPx) pan(movedPx / byId("schedule").clientWidth * windowS());
  if (fingers.size !== 2) return;
  const ratio = distance() / spread;
  if (ratio > 2 || ratio < 0.5) {
    zoom(ratio > 2 ? -1 : 1);
    spread = distance();
  }
});
for (const name of ["pointerup", "pointercancel"]) {
  byId("schedule").addEventListener(name, (event) => fingers.delete(event.pointerId));
}
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
move();
keepLooking();
