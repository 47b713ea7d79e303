"use strict";
// Two halves: the chat, which speaks the server's API, and the cache, which draws the pictures of /kvpage/live.
// Text of the model or of others is only ever set as textContent.

const $ = (id) => document.getElementById(id);

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

const number = (n) => Math.round(n).toLocaleString("en");
const percent = (part) => `${(100 * part).toFixed(part > 0 && part < 0.0995 ? 1 : 0)} %`;
const seconds = (s) => (s < 1 ? `${Math.round(1000 * s)} ms` : s < 100 ? `${s.toFixed(1)} s` : `${Math.round(s)} s`);

// --- settings and conversations: kept in this tab ---------------------------------------------------------------------

const FIELDS = { key: "api-key", salt: "salt", system: "system", maxTokens: "max-tokens", temperature: "temperature" };
const stored = JSON.parse(sessionStorage.getItem("kvpage") || "{}");
const settings = { key: "", salt: "", system: "", maxTokens: "", temperature: "0.7", ...stored.settings };
let conversations = stored.conversations || [{ turns: [] }];
let current = 0;
let about = null;
let answering = null; // the AbortController of the answer that comes

function keep() {
  try {
    sessionStorage.setItem("kvpage", JSON.stringify({ settings, conversations }));
  } catch { /* no room: the page goes on without */ }
}

function headers(more = {}) {
  const made = { ...more };
  if (settings.key) made.authorization = `Bearer ${settings.key}`;
  return made;
}

async function problem(response) {
  const body = await response.json().catch(() => null);
  const made = new Error(body?.error?.message || `the server answered ${response.status}`);
  made.status = response.status;
  made.code = body?.error?.code;
  return made;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts)
      for (const line of part.split("\n")) if (line.startsWith("data: ")) yield line.slice(6);
  }
}

// --- chat -------------------------------------------------------------------------------------------------------------

function showTabs() {
  const tabs = conversations.map((one, index) => {
    const name = one.turns[0]?.content.slice(0, 40) || "New conversation";
    const tab = element("button", "", name);
    tab.type = "button";
    tab.setAttribute("role", "tab");
    tab.setAttribute("aria-selected", String(index === current));
    tab.onclick = () => { if (!answering) { current = index; showAll(); } };
    return tab;
  });
  const more = element("button", "", "+ New");
  more.type = "button";
  more.id = "new";
  more.onclick = () => {
    if (answering) return;
    if (conversations.at(-1).turns.length) conversations.push({ turns: [] });
    current = conversations.length - 1;
    showAll();
    $("prompt").focus();
  };
  $("tabs").replaceChildren(...tabs, more);
}

function showAll() {
  showTabs();
  const { turns } = conversations[current];
  const shown = turns.map(messageOf);
  if (!shown.length) {
    const hint = element("div", "empty", element("b", "", "Say something"));
    hint.append("The second turn finds the first one in the cache: watch the prefixes and the hit rate.");
    shown.push(hint);
  }
  $("messages").replaceChildren(...shown);
  $("messages").scrollTop = $("messages").scrollHeight;
}

// A message of the user can be taken back: what follows it goes, too, and its text is in the composer again.
function takeBack(index) {
  if (answering) return;
  const { turns } = conversations[current];
  $("prompt").value = turns[index].content;
  turns.splice(index);
  keep();
  showAll();
  fit();
  $("prompt").focus();
}

function button(name, onclick) {
  const made = element("button", "act", name);
  made.type = "button";
  made.onclick = onclick;
  return made;
}

function messageOf(turn, index) {
  const message = element("div", `message ${turn.role}`, element("p", "", turn.content.trimStart()));
  if (turn.error) message.append(element("div", "facts error", turn.error));
  if (turn.role === "user" && index != null) message.append(button("Edit", () => takeBack(index)));
  if (turn.error && index) message.append(button("Retry", () => {
    if (answering) return;
    const { turns } = conversations[current], { content } = turns[index - 1];
    turns.splice(index - 1);
    send(content);
  }));
  if (turn.facts) message.append(factsOf(turn.facts));
  return message;
}

function factsOf({ prompt, cached, generated, first, total }) {
  const facts = element("div", "facts");
  if (prompt != null) {
    const found = element("i", "cached");
    found.style.width = `${(100 * cached) / prompt}%`;
    facts.append(element("div", "bar", found));
    facts.append(element("span", cached ? "found" : "", `${number(cached)} of ${number(prompt)} cached`));
  }
  if (first != null) facts.append(element("span", "", `first token ${seconds(first)}`));
  const pace = (generated - 1) / (total - first);
  const at = generated > 1 && Number.isFinite(pace) ? `, ${pace.toFixed(1)} tokens/s` : "";
  if (generated != null) facts.append(element("span", "", `${number(generated)} tokens${at}`));
  return facts;
}

function bodyOf(turns) {
  const most = Math.min(512, Math.floor((about?.max_model_len ?? 4096) / 8)); // leaves room for some turns
  const body = {
    model: about?.model, stream: true, stream_options: { include_usage: true },
    max_tokens: Number(settings.maxTokens) || most, temperature: Number(settings.temperature) || 0,
  };
  if (settings.salt) body.cache_salt = settings.salt;
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  const messages = [...system, ...turns.map(({ role, content }) => ({ role, content }))];
  if (about?.has_chat_template === false)
    return ["/v1/completions", { ...body, prompt: messages.map((one) => one.content).join("\n") + "\n" }];
  return ["/v1/chat/completions", { ...body, messages, separate_reasoning: false }];
}

async function ask(turns, answer, stop) {
  const [path, body] = bodyOf(turns);
  const begin = performance.now();
  const since = () => (performance.now() - begin) / 1000;
  const response = await fetch(path, {
    method: "POST", headers: headers({ "content-type": "application/json" }), body: JSON.stringify(body), signal: stop,
  });
  if (!response.ok) throw await problem(response);
  for await (const data of events(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const choice = chunk.choices?.[0];
    const text = choice?.delta?.content ?? choice?.text ?? "";
    if (text) {
      answer.facts.first ??= since();
      answer.content += text;
    }
    if (chunk.usage) {
      answer.facts.prompt = chunk.usage.prompt_tokens;
      answer.facts.cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
      answer.facts.generated = chunk.usage.completion_tokens;
    }
    answer.facts.total = since();
    answer.show();
  }
}

async function send(text) {
  const { turns } = conversations[current];
  turns.push({ role: "user", content: text });
  showAll();
  const answer = { role: "assistant", content: "", facts: {} };
  const message = messageOf(answer);
  message.classList.add("going");
  $("messages").append(message);
  answer.show = () => {
    const list = $("messages"), atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
    message.firstChild.textContent = answer.content.trimStart();
    if (atEnd) list.scrollTop = list.scrollHeight;
  };
  answering = new AbortController();
  setAnswering(true);
  try {
    await ask(answered(turns), answer, answering.signal);
  } catch (error) {
    if (error.name !== "AbortError") answer.error = error.message;
    if (error.status === 401) openSettings(error.message);
  }
  answering = null;
  setAnswering(false);
  delete answer.show;
  turns.push(answer);
  keep();
  showAll();
}

// The turns that the next request sends: without those that were refused, so that one of them ends no conversation.
function answered(turns) {
  const isRefused = (turn, i) => turn.error && !turn.content || turns[i + 1]?.error && !turns[i + 1].content;
  return turns.filter((turn, i) => !isRefused(turn, i));
}

function setAnswering(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
}

function fit() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight + 2}px`;
}

$("composer").onsubmit = (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || answering) return;
  $("prompt").value = "";
  fit();
  send(text);
};
$("prompt").oninput = fit;
$("prompt").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
};
$("stop").onclick = () => answering?.abort();

// --- settings ---------------------------------------------------------------------------------------------------------

function openSettings(why = "") {
  $("settings-error").textContent = why;
  for (const [name, id] of Object.entries(FIELDS)) $(id).value = settings[name];
  if (!$("settings").open) $("settings").showModal();
}

$("open-settings").onclick = () => openSettings();
$("settings").onclose = () => {
  for (const [name, id] of Object.entries(FIELDS)) settings[name] = $(id).value;
  keep();
  watchAnew();
};
for (const button of document.querySelectorAll("nav button"))
  button.onclick = () => {
    document.body.dataset.view = button.dataset.show;
    for (const one of document.querySelectorAll("nav button")) one.setAttribute("aria-pressed", String(one === button));
    draw();
  };

// --- cache: the pictures ----------------------------------------------------------------------------------------------

const SPAN = 120; // seconds that the charts show
const STATES = ["used", "pinned", "cached", "free"];
let pictures = [];
let watching = null;

function setLive(state, text) {
  $("live").dataset.state = state;
  $("live").textContent = text;
}

async function watch(stop) {
  const response = await fetch("/kvpage/about", { headers: headers(), signal: stop });
  if (!response.ok) throw await problem(response);
  about = await response.json();
  $("model").textContent = about.model;
  const live = await fetch("/kvpage/live", {
    headers: headers(settings.salt ? { "x-cache-salt": encodeURIComponent(settings.salt) } : {}), signal: stop,
  });
  if (!live.ok) throw await problem(live);
  setLive("on", "live");
  for await (const data of events(live)) {
    const picture = JSON.parse(data);
    if (!picture.blocks) return;
    if (pictures.length && picture.time < pictures.at(-1).time) pictures = [];
    pictures.push(picture);
    while (pictures[0].time < picture.time - SPAN - 2) pictures.shift();
    draw();
  }
}

async function watchAnew() {
  watching?.abort();
  if (document.hidden) return;
  const mine = (watching = new AbortController());
  for (let wait = 1; !mine.signal.aborted; wait = Math.min(2 * wait, 15)) {
    try {
      setLive("off", "connecting");
      await watch(mine.signal);
    } catch (error) {
      if (mine.signal.aborted) return;
      setLive("bad", error.status === 401 ? "needs an API key" : "not connected");
      if (error.status === 401) return openSettings(settings.key ? error.message : "");
    }
    if (!mine.signal.aborted) await new Promise((resolve) => setTimeout(resolve, 1000 * wait));
  }
}

document.onvisibilitychange = () => (document.hidden ? watching?.abort() : watchAnew());
addEventListener("resize", () => draw());
matchMedia("(prefers-color-scheme: dark)").onchange = () => draw();

function draw() {
  const last = pictures.at(-1);
  if (!last || !$("cache").clientWidth) return;
  drawTiles(last);
  $("host").hidden = !last.host;
  drawChart($("device-chart"), (picture) => picture.blocks, !last.host);
  if (last.host) drawChart($("host-chart"), (picture) => picture.host, true);
  drawHits(last);
  drawLanes(last);
  drawSessions(last.sessions || []);
  drawPrefixes(last.prefixes);
}

function drawTiles({ tokens, running, waiting, blocks, host, preempted, evicted }) {
  const before = pictures.find((one) => one.time > pictures.at(-1).time - 3) || pictures[0];
  const span = pictures.at(-1).time - before.time;
  $("hit-rate").textContent = tokens.prompt ? percent(tokens.cached / tokens.prompt) : "–";
  $("speed").textContent = span > 0 ? number((tokens.generated - before.tokens.generated) / span) : "–";
  $("running").textContent = number(running);
  $("waiting").textContent = number(waiting);
  const busy = blocks.used + blocks.pinned;
  $("device-note").textContent =
    `${number(busy)} in use, ${number(blocks.cached)} cached of ${number(blocks.total)} · ${number(evicted)} evicted`;
  if (host) $("host-note").textContent = `${number(host.cached)} cached of ${number(host.total)}`;
  $("requests-note").textContent = preempted ? `${number(preempted)} preempted so far` : "";
}

function drawChart(canvas, of, hasAxis) {
  const width = canvas.clientWidth, height = canvas.clientHeight, scale = devicePixelRatio || 1;
  if (!width) return;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  pen.scale(scale, scale);
  const shown = pictures.filter(of), end = pictures.at(-1).time, plot = height - (hasAxis ? 18 : 0);
  const span = Math.min(SPAN, Math.max(15, end - shown[0].time));
  const x = (time) => width * (1 - (end - time) / span);
  pen.fillStyle = color("free");
  pen.beginPath();
  pen.roundRect(0, 0, width, plot, 6);
  pen.fill();
  pen.save();
  pen.clip();
  const most = Math.max(0.02, ...shown.map((one) => (of(one).total - of(one).free) / of(one).total));
  const scaleOf = most < 0.25 ? 0.8 / most : 1; // a cache that is nearly empty is drawn larger, and says so
  const below = shown.map(() => 0);
  for (const state of STATES.slice(0, 3)) {
    const above = shown.map((one, i) => below[i] + of(one)[state] / of(one).total);
    const y = (part) => plot * (1 - scaleOf * part);
    pen.fillStyle = color(state);
    pen.beginPath();
    shown.forEach((one, i) => pen.lineTo(x(one.time), y(above[i])));
    for (let i = shown.length - 1; i >= 0; i--) pen.lineTo(x(shown[i].time), y(below[i]));
    pen.fill();
    above.forEach((part, i) => (below[i] = part));
  }
  pen.restore();
  pen.fillStyle = color("soft");
  pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  if (scaleOf > 1) pen.fillText(`the lowest ${percent(1 / scaleOf)}`, 6, 14);
  if (!hasAxis) return;
  pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  pen.fillStyle = color("soft");
  for (const [part, text, align] of [[0, `${number(span)} s ago`, "left"], [0.5, `${number(span / 2)} s`, "center"], [1, "now", "right"]]) {
    pen.textAlign = align;
    pen.fillText(text, width * part, height - 4);
  }
}

function bar(parts, total, className = "bar") {
  const made = element("div", className);
  for (const [name, count] of parts) {
    if (!(count > 0)) continue;
    const part = element("i", name);
    part.style.width = `${(100 * count) / total}%`;
    part.title = `${name}: ${number(count)} tokens`;
    made.append(part);
  }
  return made;
}

const KNOWN = ["device", "host", "memory", "disk"];

function drawHits({ hits, tokens, tiers }) {
  const found = hits.reduce((sum, [, count]) => sum + count, 0);
  const parts = hits.map(([name, count]) => [KNOWN.includes(name) ? name : "remote", count, name]);
  parts.push(["computed", Math.max(tokens.prompt - found, 0), "computed"]);
  $("hits-note").textContent = tokens.prompt ? `${number(tokens.prompt)} so far` : "none yet";
  $("hits-bar").replaceChildren(...bar(parts, Math.max(tokens.prompt, 1)).children);
  $("hits-key").replaceChildren(...parts.map(([name, count, label]) => {
    const tier = tiers.find((one) => one.name === label);
    const full = tier?.capacity && tier.bytes != null ? ` · ${percent(tier.bytes / tier.capacity)} full` : "";
    const share = tokens.prompt ? percent(count / tokens.prompt) : "–";
    return element("li", name, element("span", "", `${label} `, element("b", "", share), full));
  }));
}

const STAGES = { stop: "done", length: "done", abort: "stopped", error: "failed" };

function drawLanes({ requests, ended, running, waiting }) {
  const lanes = [...requests, ...ended.map((one) => ({ ...one, over: true }))].slice(0, 10);
  const longest = Math.max(1, ...lanes.map((one) => one.prompt + one.generated));
  const rows = lanes.map((one) => {
    const rest = one.over ? 0 : one.prompt - one.cached - one.loaded - one.computed;
    const parts = [["cached", one.cached], ["loaded", one.loaded], ["computed", one.computed], ["rest", rest],
      ["generated", one.generated]];
    const active = one.stage === "prefill" || one.stage === "decode";
    const count = element("span", "count", element("span", "wide", `${number(one.prompt)} + ${number(one.generated)} · `));
    count.append(one.over ? `${seconds(one.ago)} ago` : seconds(one.seconds));
    const lane = element("div", `lane${active ? " active" : ""}${one.over ? " over" : ""}`,
      element("span", "stage", STAGES[one.stage] || one.stage), bar(parts, longest), count);
    lane.title = one.id;
    if (one.why) lane.append(element("span", "why", one.why.join(" · ")));
    return lane;
  });
  const hidden = running + waiting - requests.length;
  if (hidden > 0) rows.push(element("div", "none", `${number(hidden)} more, or of others`));
  $("lanes").replaceChildren(...(rows.length ? rows : [element("div", "none", "No request yet.")]));
}

function drawSessions(sessions) {
  $("sessions-part").hidden = !sessions.length;
  $("sessions").replaceChildren(...sessions.map((one) => {
    const pause = one.paused_in ? ` · paused in ${one.paused_in}, due in ${seconds(Math.max(one.due_in, 0))}` : "";
    const edit = one.edit ? ` · its edit: ${number(one.edit_tokens)} to compute` : "";
    const branches = one.branches > 1 ? ` · ${number(one.branches)} branches` : "";
    const what = element("div", "what", element("code", "", one.id), `${branches}${pause}${edit}`);
    const numbers = element("div", "numbers", element("b", "", number(one.turns)), element("span", "", number(one.tokens)),
      element("span", "", number(one.blocks)));
    const row = element("div", `prefix${one.blocks ? " held" : ""}`, what, numbers);
    row.title = one.edit || one.id;
    return row;
  }));
}

function drawPrefixes(prefixes) {
  const children = new Map();
  prefixes.forEach((one, i) => children.set(one.parent, [...(children.get(one.parent) || []), i]));
  const most = Math.max(1, ...prefixes.map((one) => one.hits));
  const rows = [];
  const add = (index, depth) => {
    const one = prefixes[index];
    const heat = element("i");
    heat.style.width = `${(100 * one.hits) / most}%`;
    const visible = one.text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
    const what = element("div", "what", heat, element("code", "", visible));
    what.style.marginLeft = `${0.9 * Math.min(depth, 8)}rem`;
    const blocks = one.host_blocks ? `${number(one.blocks)}+${number(one.host_blocks)}` : number(one.blocks);
    const numbers = element("div", "numbers", element("b", "", `${number(one.hits)}×`), element("span", "", number(one.tokens)), element("span", "", blocks));
    const row = element("div", `prefix${one.pins ? " held" : ""}`, what, numbers);
    row.title = `${number(one.tokens)} tokens after ${number(one.start)}: ${one.text}`;
    rows.push(row);
    for (const child of children.get(index) || []) add(child, depth + 1);
  };
  for (const root of children.get(null) || []) add(root, 0);
  const nothing = about?.shows_prefixes === false ? "They are in the replicas, and not shown here." : "Nothing is cached yet.";
  $("prefixes").replaceChildren(...(rows.length ? rows : [element("div", "none", nothing)]));
}

showAll();
watchAnew();
