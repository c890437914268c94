// Teaching, where the service takes photographs (teach: true): pictures dropped onto a class, and answers put right.

import { byId as $, make } from "./draw.js";

const LISTED_CLASSES = 30; // each with a place of its own; of more classes one is chosen from a list
const NONE = "none";

/** @typedef {{keep: (label: string, file: File) => Promise<object>, erase: (id: string) => Promise<object>, figures: () => Promise<object>}} Teacher */

/** The classes that a picture can be taught as; "none" is for pictures of none of them. */
function choices({ labels }) {
  return labels.some((label) => label.toLowerCase() === NONE) ? labels : [...labels, NONE];
}

const nameOf = (label) => (label === NONE ? "none of these" : label);
const pictures = (count) => `${count} photograph${count === 1 ? "" : "s"}`;

const chooser = (models) => choices(models).map((label) => new Option(nameOf(label), label));

/** Offers to say what a picture shows, below its answer. */
export function offerCorrection({ file, result }, models, teacher) {
  $("correct").hidden = !models?.teach || Boolean(result?.error);
  if ($("correct").hidden) return;
  $("right").replaceChildren(...chooser(models));
  const second = result.predictions[1]?.label; // the likeliest, if the first is wrong
  if (models.labels.includes(second)) $("right").value = second;
  $("corrected").textContent = "";
  $("correct").onsubmit = async (event) => {
    event.preventDefault();
    await keepAll([file], $("right").value, teacher, $("corrected"));
  };
}

/** Draws the classes with the pictures that they have, onto which others can be dropped. */
export async function offerTeaching(models, teacher) {
  $("teach").hidden = !models.teach;
  if (!models.teach) return;
  const labels = choices(models);
  const isShort = labels.length <= LISTED_CLASSES + 1;
  $("teach-class").hidden = isShort;
  $("teach-as").replaceChildren(...(isShort ? [] : chooser(models)));
  const taken = (label) => (files) => keepAll(files, label(), teacher, $("taught"));
  $("tiles").replaceChildren(
    ...(isShort ? labels.map((label) => tile(nameOf(label), label, taken(() => label))) : [tile("Photographs of it", "", taken(() => $("teach-as").value))]),
  );
  await count(teacher);
}

function tile(name, label, onFiles) {
  const input = make("input", "sr-only");
  Object.assign(input, { type: "file", accept: $("file").accept, multiple: true });
  input.addEventListener("change", () => {
    onFiles([...input.files]);
    input.value = "";
  });
  const node = make("label", "tile", input, make("strong", "", name), make("span", "soft", "drop or choose"));
  node.dataset.label = label;
  const mark = (isOver) => node.classList.toggle("over", isOver);
  for (const [kind, isOver] of [["dragover", true], ["dragleave", false], ["drop", false]]) {
    node.addEventListener(kind, (event) => {
      event.preventDefault();
      event.stopPropagation(); // elsewhere a file is classified
      $("drop").classList.remove("over");
      mark(isOver);
      if (kind === "drop" && event.dataTransfer.files.length) onFiles([...event.dataTransfer.files]);
    });
  }
  return make("li", "", node);
}

/** Sends pictures one after another, and says how far it is; the first error ends it. */
async function keepAll(files, label, teacher, said) {
  const button = $("correct").querySelector("button");
  button.disabled = true;
  const kept = [];
  try {
    for (const file of files) {
      said.textContent = files.length > 1 ? `Sending ${kept.length + 1} of ${files.length}` : "Sending";
      kept.push((await teacher.keep(label, file)).id);
    }
    said.textContent = `Kept as ${nameOf(label)}: ${pictures(kept.length)}. `;
  } catch (error) {
    said.textContent = `${kept.length ? `${pictures(kept.length)} kept, then: ` : "Not kept. "}${error.message} `;
  }
  if (kept.length) said.append(undoing(kept, teacher, said));
  button.disabled = false;
  await count(teacher);
}

function undoing(ids, teacher, said) {
  const undo = make("button", "undo", "Undo");
  undo.type = "button";
  undo.addEventListener("click", async () => {
    undo.disabled = true;
    try {
      for (const id of new Set(ids)) await teacher.erase(id);
      said.textContent = "Erased.";
    } catch (error) {
      said.textContent = error.message;
    }
    await count(teacher);
  });
  return undo;
}

/** Shows how many pictures each class has. */
async function count(teacher) {
  try {
    const { labels, photographs } = await teacher.figures();
    for (const node of $("tiles").querySelectorAll(".tile")) {
      const own = node.dataset.label ? (labels[node.dataset.label] ?? 0) : photographs;
      node.lastChild.textContent = own ? pictures(own) : "drop or choose";
    }
    $("teach-next").hidden = !photographs || !teacher.showsCommands();
  } catch (error) {
    $("taught").textContent = error.message;
  }
}
