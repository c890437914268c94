// Everything the page draws. What the server or a file name says becomes text nodes and nothing else, and sizes are set
// through element.style: the content security policy allows neither markup nor style in strings.

const LISTED_CLASSES = 30;
const NUM_GHOSTS = 5;
const NUM_HUES = 4;
const NUMBERS = ["", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"];

export const byId = (id) => document.getElementById(id);
const $ = byId;

/** Makes an element; strings among the children become text nodes. */
export function make(tag, className = "", ...children) {
  const node = document.createElement(tag);
  node.className = className;
  node.append(...children);
  return node;
}

/** Shows a text in the element, or hides it when there is nothing to say. */
function say(id, text) {
  $(id).textContent = text;
  $(id).hidden = !text;
}

function percent(share) {
  if (share > 0.999 && share < 1) return ">99.9%";
  return share > 0 && share < 0.001 ? "<0.1%" : `${(100 * share).toFixed(1)}%`;
}

const bytes = (count) => (count < 1e6 ? `${Math.ceil(count / 1e3)} KB` : `${(count / 1e6).toFixed(1)} MB`);
const milliseconds = (ms) => `${ms.toFixed(ms < 100 ? 1 : 0)} ms`;

/** Tells those who do not see the page; errors have a live region of their own. */
export function announce(text) {
  if ($("status").textContent !== text) $("status").textContent = text;
}

// ---- the answer panel

/** Puts the panel into one of its states (idle, waiting, busy, done, error) and clears what the last one left. */
export function phase(name, headline, verdict) {
  const isPending = name === "busy" || name === "waiting";
  $("answer").dataset.phase = name;
  delete $("answer").dataset.sure;
  $("answer").setAttribute("aria-busy", isPending);
  $("headline").textContent = headline;
  $("verdict").textContent = verdict;
  for (const id of ["among", "share", "problem", "elsewhere"]) $(id).textContent = "";
  $("others").replaceChildren();
  for (const id of ["degraded", "retry", "key-form", "correct"]) $(id).hidden = true;
  $("bars").replaceChildren(...Array.from({ length: NUM_GHOSTS }, () => make("li", "ghost", make("span", "track"))));
  $("details").classList.toggle("stale", isPending);
  if (isPending) announce(`${headline} ${verdict}`);
}

export function failure(headline, message) {
  phase("error", headline, "");
  $("problem").textContent = message;
  $("details").hidden = true;
}

/** Offers another try for pictures whose error may pass. */
export function retry(count, of) {
  $("retry").hidden = !count;
  $("retry").textContent = of > 1 ? `Try ${count} again` : "Try again";
}

/** Shows how much of a picture has been sent, and that a slow line gets a smaller one. */
export function progress(of, index, share, isSlow) {
  const text = share < 1 ? `Sending, ${Math.floor(100 * share)}%` : "Looking…";
  if (of === 1) $("headline").textContent = text;
  if (isSlow) $("verdict").textContent = "The line is slow: a smaller picture is sent.";
  const bar = $("cards").children[index]?.querySelector("progress");
  if (!bar) return;
  bar.value = share;
  bar.nextSibling.textContent = text;
}

/** Asks for a key, which the service wants and did not get, or not the right one. */
export function askForKey(message) {
  failure("A key is needed", message);
  $("batch").hidden = true;
  $("key-form").hidden = false;
  $("key").focus();
}

/**
 * Draws one answer: the ensemble's and each member's classes, and the time it took.
 * @param {object} result one answer of POST /v1/classify
 * @param {?object} served what /v1/models says of the set
 * @param {(name: string) => void} onSet takes another set
 */
export function answer(result, served, onSet) {
  const roster = served?.members ?? [];
  phase("done", named(result), verdict(result));
  $("among").textContent = among(result, served);
  if (result.sure === false) elsewhere(served, onSet);
  if ("sure" in result) $("answer").dataset.sure = result.sure;
  $("share").textContent = share(result);
  $("bars").replaceChildren(...result.predictions.map(bar));
  say("degraded", result.degraded ? degraded(result, roster) : "");
  members(result.members, roster);
  timeline(result.timings_ms, roster);
  $("request-id").textContent = result.request_id;
  $("details").hidden = false;
  announce(`${[$("among").textContent + $("headline").textContent, $("share").textContent].filter(Boolean).join(", ")}. ${$("verdict").textContent} ${$("degraded").textContent}`);
}

/** How likely the headline is; of several labels, or none, the bars say it. */
function share({ predictions, threshold }) {
  return threshold === undefined || predictions.length === 1 ? percent(predictions[0].probability) : "";
}

/** The first label; of a multi-label set (its answers have a threshold) all, or that there is none. */
function named({ predictions, threshold }) {
  if (threshold === undefined) return predictions[0].label;
  return predictions.map(({ label }) => label).join(", ") || "No label";
}

const inWords = (count) => NUMBERS[count] ?? count.toLocaleString("en");

/** What stands before the label: whether the answer is sure, and of a set of few classes how many these are. */
function among({ sure, threshold }, served) {
  const isFew = served && threshold === undefined && served.labels.length <= LISTED_CLASSES;
  if (sure === false) return isFew ? `Not sure, one of ${inWords(served.labels.length)}: ` : "Not sure, perhaps: ";
  return isFew ? `One of ${inWords(served.labels.length)}: ` : "";
}

/** Offers the service's other sets for a picture that this one is not sure of, or else says how to get more classes. */
function elsewhere(served, onSet) {
  const others = (served?.model_sets ?? []).filter((name) => name !== served.model_set);
  $("elsewhere").textContent = others.length ? "Is it something else? Other sets know other classes:" : (served?.hint ?? "");
  $("others").replaceChildren(...others.map((name) => {
    const button = make("button", "", `Ask ${name}`);
    button.type = "button";
    button.addEventListener("click", () => onSet(name));
    return button;
  }));
}

function verdict({ members, agreement, skipped_members: skipped, threshold, reason }) {
  const names = Object.keys(members);
  if (skipped?.length) {
    const why = reason === "load" ? " The service is busy, so it asks fewer." : "";
    const [was, were] = [names.join(" and "), skipped.join(" and ")];
    return `The answer of ${was} was likely enough; ${were} ${skipped.length > 1 ? "were" : "was"} not asked.${why}`;
  }
  if (names.length < 2) return "";
  if (agreement) return names.length === 2 ? "Both members agree." : `All ${names.length} members agree.`;
  const say = (name) => (threshold === undefined ? members[name].label : named({ ...members[name], threshold }));
  return `The members disagree: ${names.map((name) => `${name} says ${say(name)}`).join(", ")}.`;
}

function degraded({ members, missing_members: why = {} }, roster) {
  const absent = roster.map(({ name }) => name).filter((name) => !(name in members));
  const missing = absent.map((name) => (why[name] ? `${name} (${why[name].replaceAll("_", " ")})` : name));
  return missing.length ? `Degraded: this answer came about without ${missing.join(" and ")}.` : "Degraded: not every member took part in this answer.";
}

function bar({ label, probability }) {
  const fill = make("span", "fill");
  fill.style.width = `${100 * probability}%`;
  return make("li", "", make("span", "label", label), make("span", "percent", percent(probability)), make("span", "track", fill));
}

// ---- members and timeline

/** The hue that marks a member wherever it appears: its place in the model set. */
function hue(name, roster) {
  return Math.max(roster.findIndex((member) => member.name === name), 0) % NUM_HUES;
}

function dot(name, roster) {
  const node = make("span", "dot");
  node.dataset.hue = hue(name, roster);
  return node;
}

function members(answers, roster) {
  $("members").replaceChildren(...Object.entries(answers).map(([name, { predictions }]) => {
    const precision = roster.find((member) => member.name === name)?.precision ?? "";
    const list = make("ol", "bars", ...predictions.map(bar));
    list.dataset.hue = hue(name, roster);
    return make("div", "member", make("h3", "", dot(name, roster), name, make("span", "soft", precision)), list);
  }));
}

/** One row per stage; rows of the same stage stand together, so that members at work at once are seen to be. */
function timeline({ total, stages }, roster) {
  const order = [...new Set(stages.map(({ stage }) => stage))];
  const rows = [...stages].sort((a, b) => order.indexOf(a.stage) - order.indexOf(b.stage));
  const end = Math.max(total, 0.1);
  $("total").textContent = milliseconds(total);
  $("round-trip").textContent = "in the service";
  $("axis").replaceChildren(...ticks(end).map((ms) => {
    const tick = make("span", "tick", make("span", "", `${ms}`));
    tick.style.left = `${(100 * ms) / end}%`;
    return tick;
  }));
  $("stages").replaceChildren(...rows.map((row) => stageRow(row, end, roster)));
}

/** Says that a smaller picture was sent in place of the file. */
export function sent({ file, sent: { body, side } }) {
  say("sent", side ? `sent as ${side} px, ${bytes(body.size)} of ${bytes(file.size)}` : "");
}

export function roundTrip(ms) {
  $("round-trip").textContent = `in the service, ${milliseconds(ms)} as seen from this browser`;
}

function stageRow({ stage, member, start_ms, duration_ms }, end, roster) {
  const start = Math.min(Math.max(start_ms, 0), end);
  const span = make("span", "span");
  span.style.left = `${(100 * start) / end}%`;
  span.style.width = `${(100 * Math.min(duration_ms, end - start)) / end}%`;
  span.dataset.stage = stage;
  if (member) span.dataset.hue = hue(member, roster);
  const name = member ? [dot(member, roster), stage, " ", make("span", "of", member)] : [stage];
  return make("li", "", make("span", "stage", ...name), make("span", "lane", span), make("span", "percent", milliseconds(duration_ms)));
}

/** At most six round numbers from 0 to end. */
function ticks(end) {
  const rough = end / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  return Array.from({ length: Math.floor(end / step) + 1 }, (_, i) => Number((i * step).toPrecision(3)));
}

// ---- pictures and the cards of several

export function preview({ file, url }) {
  $("drop").classList.add("filled");
  $("preview").src = url;
  $("preview").hidden = $("caption").hidden = false;
  $("filename").textContent = file.name;
}

/** The list of several files; each card opens its own answer. */
export function cards(items, chosen, onSelect) {
  $("batch").hidden = items.length < 2;
  if ($("batch").hidden) return;
  const focused = [...$("cards").children].findIndex((row) => row.contains(document.activeElement));
  $("batch-title").textContent = `${items.length} files`;
  $("cards").replaceChildren(...items.map((item, i) => make("li", "", card(item, i === chosen, () => onSelect(i)))));
  $("cards").children[focused]?.firstChild.focus();
}

function card({ file, url, result }, isChosen, onClick) {
  const picture = make("img");
  picture.alt = "";
  picture.addEventListener("error", () => picture.replaceWith(make("span", "no-picture")));
  picture.src = url;
  const node = make("button", "card", picture, make("span", "name", file.name), ...cardText(result));
  node.type = "button";
  node.disabled = !result;
  node.setAttribute("aria-pressed", isChosen);
  node.addEventListener("click", onClick);
  return node;
}

function cardText(result) {
  if (!result) {
    const bar = make("progress");
    bar.value = 0;
    bar.setAttribute("aria-label", "sent");
    return [bar, make("span", "aside", "Waiting")];
  }
  if (result.error) return [make("span", "wrong", result.error.message)];
  const doubt = result.sure === false ? "Not sure: perhaps " : "";
  const said = make("span", "said", make("span", "label", doubt + named(result)), make("span", "percent", share(result)));
  return [said, make("span", "aside", result.degraded ? "Degraded answer." : verdict(result))];
}

// ---- what the served set knows

/** Says what the served set can answer at all, and how to get more. */
export function classes({ model_set, labels, hint, ...served }) {
  const isShort = labels.length <= LISTED_CLASSES;
  $("classes").textContent = `The served set, ${model_set}, knows ${labels.length} classes${isShort ? ":" : "."}`;
  $(isShort ? "labels" : "all-labels").replaceChildren(...labels.map((label) => make("li", "", label)));
  $("labels").hidden = !isShort;
  $("more").hidden = isShort;
  const isForced = served.task !== "multi_label";
  $("caveat").hidden = !isForced;
  $("forced").textContent = isForced ? `The answer is one of the set's ${inWords(labels.length)} classes, whatever the picture shows.` : "";
  $("averaged").hidden = !isForced || served.members.length < 2 || Boolean(served.combine);
  say("accuracy", accuracyText(served));
  say("sure", sureText(served));
  say("hint", hint ?? "");
}

/** Offers pictures to try, by their label and file. */
export function examples(pictures, onChoose) {
  $("examples").hidden = !pictures.length;
  const buttons = pictures.map(([label, file]) => {
    const picture = make("img");
    picture.alt = label;
    picture.width = picture.height = 52;
    picture.src = `page/${file}`;
    const button = make("button", "example", picture);
    button.type = "button";
    button.addEventListener("click", () => onChoose(file));
    return button;
  });
  $("examples").replaceChildren(make("span", "soft", "No picture at hand?"), ...buttons);
}

/** Lists the sets of a service that has several. */
export function sets({ model_set: chosen, model_sets: names = [] }) {
  $("sets").hidden = !names.length;
  $("model-set").replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
}

/** Returns the set's precision; members that have no INT8 network run float beside the others. */
const precisionOf = (members) => (members.some(({ precision }) => precision === "INT8") ? "INT8" : "FP16");

/** Returns how often the ensemble is right, by the newest record in the set's ledger. */
function accuracyText({ accuracy = [], members = [], verified, fast_plan: plan }) {
  const record = accuracy.at(-1);
  const score = record?.scores[precisionOf(members)]?.ensemble;
  if (verified === "unmeasured" || !score) {
    const judged = plan?.judged;
    return judged ? `Right in ${percent(judged.full_top1)} of ${judged.num_images} photographs of ${plan.dataset}.` : "Its accuracy was not measured.";
  }
  const lost = { dropped: " Its INT8 networks lost more accuracy than the set allows.", unknown: " They are too few to tell what INT8 costs." }[verified] ?? "";
  if ("micro_f1" in score) {
    const [mean, f1] = [score.mean_average_precision, score.micro_f1].map(percent);
    return `On ${record.num_images} photographs it had not seen: mean average precision ${mean}, micro F1 ${f1}.${lost}`;
  }
  const [low, high] = score.top1_interval.map(percent);
  return `Right in ${percent(score.top1)} of ${record.num_images} photographs it had not seen (${low} to ${high}).${lost}`;
}

/** Returns what a sure answer is worth, and on which images that was measured. */
function sureText({ sure }) {
  if (!sure?.right) return "";
  const on = sure.measured_on ? ` (${sure.measured_on})` : "";
  const counted = sure.wrong_weight > 1 ? `, each wrong answer counted ${sure.wrong_weight} times` : "";
  const others = sure.foreign && ` Of ${sure.foreign.num_images} images of other classes ${percent(sure.foreign.share)} are sure too.`;
  return `Sure: ${percent(sure.share)} of the answers to ${sure.num_images} images${on}, ${percent(sure.right)} of them right${counted}.${others ?? ""}`;
}

export function noClasses(message) {
  $("classes").textContent = message;
  for (const id of ["labels", "more", "caveat", "accuracy", "sure", "hint"]) $(id).hidden = true;
}
