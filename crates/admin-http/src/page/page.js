"use strict";

// Text of the model reaches the page through textContent alone.

const PERIOD_MS = 1000;
const SERIES_LENGTH = 120;

const $ = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en");
const percent = (part, of) => (of ? `${((100 * part) / of).toFixed(1)} %` : "–");

/** A new element with a class and a text. */
function element(tag, className, text) {
  const made = document.createElement(tag);
  made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function show(figures) {
  for (const [id, value] of Object.entries(figures)) {
    $(id).textContent = typeof value === "number" ? whole.format(value) : value;
  }
}

// ---- Figures

const series = [];
let last = null;

/** Generated and computed tokens per second since the figures before. */
function rates(stats) {
  const now = performance.now();
  const before = last;
  last = { now, stats };
  if (!before) return null;
  const seconds = (now - before.now) / 1000;
  const since = (name) => Math.max(0, stats[name] - before.stats[name]) / seconds;
  return { generated: since("completion_tokens"), computed: since("computed_tokens") };
}

function drawSeries() {
  const max = Math.max(1, ...series);
  const x = (i) => 240 - (series.length - 1 - i) * (240 / (SERIES_LENGTH - 1));
  const points = series.map((rate, i) => `${x(i).toFixed(1)},${(78 - (74 * rate) / max).toFixed(1)}`);
  const line = `M${points.join("L")}`;
  document.querySelector("#series .line").setAttribute("d", line);
  document.querySelector("#series .area").setAttribute("d", `${line}L240,80L${x(0).toFixed(1)},80Z`);
  $("series-max").textContent = `at most ${whole.format(Math.round(max))}`;
}

function drawPositions(speculation, depth) {
  const list = $("positions");
  while (list.children.length > depth) list.lastChild.remove();
  while (list.children.length < depth) {
    const item = element("li", "");
    const track = element("span", "track");
    track.append(element("i", ""));
    item.append(element("span", "", String(list.children.length + 1)), track, element("b", ""));
    list.append(item);
  }
  [...list.children].forEach((item, i) => {
    const accepted = speculation.accepted_per_position[i] || 0;
    const drafted = speculation.drafted_per_position[i] || 0;
    item.querySelector("i").style.width = drafted ? `${(100 * accepted) / drafted}%` : "0";
    item.querySelector("b").textContent = percent(accepted, drafted);
    item.title = `${whole.format(accepted)} of ${whole.format(drafted)}`;
  });
  $("no-drafts").hidden = speculation.verify_steps > 0;
}

function drawBlocks(stats) {
  const free = stats.total_blocks - stats.used_blocks - stats.cached_blocks;
  const width = (n) => `${(100 * n) / stats.total_blocks}%`;
  document.querySelector("#blocks .used").style.width = width(stats.used_blocks);
  document.querySelector("#blocks .cached").style.width = width(stats.cached_blocks);
  $("blocks").setAttribute("aria-label",
    `${stats.used_blocks} used, ${stats.cached_blocks} cached, ${free} free`);
  show({ used: stats.used_blocks, cached: stats.cached_blocks, free });
}

function drawIndexer(indexer) {
  $("indexer").hidden = !indexer;
  if (!indexer) return;
  const passes = [["prefill", indexer.target_prefill], ["verify", indexer.target_verify]];
  indexer.draft_steps.forEach((counts, i) => passes.push([`draft ${i + 1}`, counts]));
  const rows = passes.map(([name, counts]) => {
    const row = element("tr", "");
    const cells = [name, counts.launches, counts.rows, counts.scored_keys];
    row.append(...cells.map((cell) =>
      element("td", "", typeof cell === "number" ? whole.format(cell) : cell)));
    return row;
  });
  document.querySelector("#indexer tbody").replaceChildren(...rows);
}

function drawFacts(model, server) {
  const attention = model.index_topk ? `top ${model.index_topk} keys` : "dense attention";
  $("facts").textContent = [
    model.served_model_name, model.architecture, model.dtype, attention,
    `${whole.format(model.max_model_len)} tokens`,
    `${model.num_speculative_tokens} drafts a step`,
    `version ${server.version}`,
    model.synthetic_acceptance ? "SYNTHETIC ACCEPTANCE: texts mean nothing" : "",
  ].filter(Boolean).join(" · ");
}

function draw({ state, reason, prompts, model, server, stats }) {
  $("state").textContent = reason ? `${state}: ${reason}` : state;
  $("state").className = state;
  if (!stats) return;
  drawFacts(model, server);
  $("try").hidden = !(prompts && model.has_tokenizer);
  $("drafts").max = model.num_speculative_tokens;
  const speculation = stats.speculation;
  show({
    running: stats.running_requests,
    waiting: stats.waiting_requests,
    preempted: stats.preempted_requests,
    length: speculation.acceptance_length ? speculation.acceptance_length.toFixed(2) : "–",
    accepted: speculation.accepted_tokens,
    drafted: speculation.draft_tokens,
    "hit-rate": percent(stats.prefix_hit_tokens, stats.prefix_queried_tokens),
    evicted: stats.evicted_blocks,
    preemptions: stats.preemptions,
  });
  const rate = rates(stats);
  if (rate) {
    show({ rate: Math.round(rate.generated), "computed-rate": Math.round(rate.computed) });
    series.push(rate.generated);
    if (series.length > SERIES_LENGTH) series.shift();
    drawSeries();
  }
  drawPositions(speculation, model.num_speculative_tokens);
  drawBlocks(stats);
  drawIndexer(stats.indexer);
}

async function poll() {
  try {
    const answer = await fetch("/api/stats");
    if (!answer.ok) throw new Error(answer.statusText);
    draw(await answer.json());
  } catch {
    $("state").textContent = "no answer";
    $("state").className = "away";
    last = null;
  }
  setTimeout(poll, PERIOD_MS);
}

// ---- The prompt box

let running = null;

/** Yields the name and the data of each server-sent event. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    let end;
    while ((end = buffer.indexOf("\n\n")) >= 0) {
      const lines = buffer.slice(0, end).split("\n");
      buffer = buffer.slice(end + 2);
      const field = (name) => lines.find((line) => line.startsWith(`${name}: `))?.slice(name.length + 2);
      if (field("data")) yield [field("event"), JSON.parse(field("data"))];
    }
  }
}

/** The request that the form says; what is empty is left out. */
function request() {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  return {
    prompt: $("prompt").value,
    max_tokens: number("max-tokens"),
    temperature: number("temperature"),
    seed: number("seed"),
    num_speculative_tokens: number("drafts"),
    ignore_eos: $("ignore-eos").checked,
  };
}

let willFollow = false;

/** Keeps the end of the output in view where it is: once a frame, since to look is to lay it out. */
function followEnd(output) {
  if (willFollow) return;
  willFollow = true;
  const atEnd = output.scrollHeight - output.scrollTop - output.clientHeight < 40;
  requestAnimationFrame(() => {
    willFollow = false;
    if (atEnd) output.scrollTop = output.scrollHeight;
  });
}

/** Adds what one step made. The drafts that it rejected belong to its last token. */
function addStep(step) {
  const output = $("output");
  followEnd(output);
  step.token_ids.forEach((id, i) => {
    const isAccepted = i < step.n_accepted;
    const token = element("span", `token ${isAccepted ? "accepted" : "target"}`, step.text_pieces[i]);
    const rejected = step.draft_texts.slice(step.n_accepted);
    if (!isAccepted && rejected.length > 0) {
      token.classList.add("rejected");
      token.classList.toggle("newline", token.textContent.startsWith("\n"));
      token.tabIndex = 0;
      token.rejected = rejected.map((text, j) => text ?? `#${step.draft_token_ids[step.n_accepted + j]}`);
      token.setAttribute("aria-label",
        `${step.text_pieces[i]}, in place of ${token.rejected.join("")}`);
    }
    output.append(token);
  });
}

function say(text, isError) {
  $("summary").textContent = text;
  $("summary").classList.toggle("error", Boolean(isError));
}

function finish(end, startedAt) {
  $("output").append(end.tail_text);
  const seconds = (performance.now() - startedAt) / 1000;
  const n = end.usage.completion_tokens;
  const spec = end.speculation;
  const drafts = spec.draft_tokens
    ? ` ${spec.accepted_tokens} of ${spec.draft_tokens} drafts accepted, ${spec.acceptance_length.toFixed(2)} tokens a verify step.`
    : "";
  const reason = end.finish_reason.replace("FINISH_REASON_", "").toLowerCase().replaceAll("_", " ");
  say(`${n} tokens in ${seconds.toFixed(2)} s, ${(n / seconds).toFixed(0)} a second; ended by ${reason}.${drafts}`);
}

async function complete(signal) {
  const startedAt = performance.now();
  const answer = await fetch("/api/generate", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(request()),
    signal,
  });
  if (!answer.headers.get("content-type")?.startsWith("text/event-stream")) {
    const text = await answer.text();
    let message = text;
    try {
      message = JSON.parse(text).error.message;
    } catch { /* Not one of ours: shown as it is. */ }
    throw new Error(message);
  }
  for await (const [name, data] of events(answer.body)) {
    if (name === "step") addStep(data);
    else if (name === "finished") return finish(data, startedAt);
    else if (name === "error") throw new Error(data.message);
  }
  throw new Error("the connection ended before the completion did");
}

async function submit(event) {
  event.preventDefault();
  if (running) return;
  running = new AbortController();
  $("output").replaceChildren();
  say("");
  setRunning(true);
  try {
    await complete(running.signal);
  } catch (error) {
    const wasStopped = running.signal.aborted;
    say(wasStopped ? "Stopped." : error.message, !wasStopped);
  }
  running = null;
  setRunning(false);
}

/** Enables the button that makes sense now. It gets the focus of the other one, which loses it. */
function setRunning(isRunning) {
  const [off, on] = isRunning ? [$("go"), $("stop")] : [$("stop"), $("go")];
  const hadFocus = document.activeElement === off;
  on.disabled = false;
  if (hadFocus) on.focus();
  off.disabled = true;
}

// ---- Rejected drafts

function showTip(event) {
  const token = event.target;
  const tip = $("tip");
  if (!token.rejected) {
    tip.hidden = true;
    return;
  }
  const drafts = token.rejected.map((text) => element("code", "", JSON.stringify(text).slice(1, -1)));
  tip.replaceChildren(token.rejected.length > 1 ? "rejected drafts " : "rejected draft ",
    ...drafts.flatMap((draft, i) => (i ? [" ", draft] : [draft])));
  tip.hidden = false;
  const at = token.getClientRects()[0] ?? token.getBoundingClientRect();
  const left = Math.min(at.left, innerWidth - tip.offsetWidth - 8);
  tip.style.left = `${Math.max(8, left)}px`;
  const above = at.top - tip.offsetHeight - 6;
  tip.style.top = `${above > 0 ? above : at.bottom + 6}px`;
}

const hideTip = () => { $("tip").hidden = true; };
$("output").addEventListener("mouseover", showTip);
$("output").addEventListener("focusin", showTip);
$("output").addEventListener("mouseleave", hideTip);
$("output").addEventListener("focusout", hideTip);
document.addEventListener("keydown", ({ key }) => { if (key === "Escape") hideTip(); });
// What is below the pointer afterwards may be another token, or the same one elsewhere.
$("output").addEventListener("scroll", () => {
  const target = $("output").querySelector(".rejected:hover, .rejected:focus");
  if (target) showTip({ target });
  else hideTip();
});
document.querySelector("form").addEventListener("submit", submit);
$("stop").addEventListener("click", () => running?.abort());
poll();
