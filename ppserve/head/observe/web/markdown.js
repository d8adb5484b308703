"use strict";
// Answers are markdown. It becomes elements whose texts are set as texts: nothing that a model writes is ever markup.

const byId = (id) => document.getElementById(id);

function element(tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ROW = /^\s*\|.*\|\s*$/;

/** Blocks as {kind, lines, ...}. A fence that is not closed yet is code to the end. */
function blocksOf(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n"), blocks = [];
  const take = (test) => { const taken = []; while (lines.length && test(lines[0])) taken.push(lines.shift()); return taken; };
  while (lines.length) {
    const line = lines[0], fence = line.match(FENCE);
    if (!line.trim()) {
      lines.shift();
    } else if (fence) {
      lines.shift();
      const ends = (each) => each.trim().startsWith(fence[1]) && !each.trim().replaceAll(fence[1][0], "");
      blocks.push({kind: "code", language: fence[2], lines: take((each) => !ends(each))});
      lines.shift();
    } else if (HEADING.test(line)) {
      blocks.push({kind: "heading", lines: [lines.shift()]});
    } else if (RULE.test(line)) {
      blocks.push({kind: "rule", lines: [lines.shift()]});
    } else if (ITEM.test(line)) {
      blocks.push({kind: "list", lines: take((each) => ITEM.test(each) || /^\s+\S/.test(each))});
    } else if (QUOTE.test(line)) {
      blocks.push({kind: "quote", lines: take((each) => QUOTE.test(each))});
    } else if (ROW.test(line) && /^[\s|:-]+$/.test(lines[1] ?? "")) {
      blocks.push({kind: "table", lines: take((each) => ROW.test(each))});
    } else {
      const others = [FENCE, HEADING, ITEM, QUOTE, RULE];
      const first = lines.shift();
      blocks.push({kind: "text", lines: [first, ...take((each) => each.trim() && !others.some((other) => other.test(each)))]});
    }
  }
  return blocks;
}

/** Code, bold, italic, struck and links; the rest is text. */
const SPAN = /(`+)([^`].*?)\1(?!`)|\*\*(\S(?:.*?\S)?)\*\*|__(\S(?:.*?\S)?)__|\*(\S(?:[^*]*?\S)?)\*|(?<!\w)_(\S(?:[^_]*?\S)?)_(?!\w)|~~(.+?)~~|!?\[([^\[\]]{0,500})\]\(([^\s()]{1,2000})(?:\s[^()]{0,300})?\)/s;

function spansInto(parent, text, depth = 0) {
  while (text) {
    const found = depth < 8 ? text.match(SPAN) : null;
    parent.append(found ? text.slice(0, found.index) : text);
    if (!found) return;
    const [all, , code, strong, stronger, italic, italics, struck, label, target] = found;
    const nested = (tag, inner) => { const made = element(tag); spansInto(made, inner, depth + 1); parent.append(made); };
    if (code !== undefined) parent.append(element("code", code));
    else if ((strong ?? stronger) !== undefined) nested("strong", strong ?? stronger);
    else if ((italic ?? italics) !== undefined) nested("em", italic ?? italics);
    else if (struck !== undefined) nested("s", struck);
    else if (/^(https?|mailto):/i.test(target)) {
      parent.append(element("a", label || target, {href: target, rel: "noopener noreferrer nofollow", target: "_blank"}));
    } else parent.append(all);
    text = text.slice(found.index + all.length);
  }
}

function copyButton(textOf) {
  const button = element("button", "Copy", {type: "button"});
  button.addEventListener("click", async () => {
    button.textContent = await copied(textOf()) ? "Copied" : "Select it and copy by hand";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  return button;
}

/** Whether the text is in the clipboard. Pages of plain HTTP from another host have only the older way. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = element("textarea", text, {class: "unseen", "aria-hidden": "true"});
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

function codeBlock(text, language) {
  const block = element("div", "", {class: "code"}), bar = element("div", "", {class: "bar-of-code"});
  const pre = element("pre", "", {tabindex: "0", role: "region", "aria-label": language ? `Code: ${language}` : "Code"});
  pre.append(element("code", text));
  bar.append(element("span", language || "code"), copyButton(() => text));
  block.append(bar, pre);
  return block;
}

/** A list of lists: deeper items belong to the one above them. */
function listOf(lines) {
  const items = [];
  const indent = lines[0].match(ITEM)[1].length;
  for (const line of lines) {
    const item = line.match(ITEM);
    if (item && item[1].length <= indent + 1) items.push({first: item[3], mark: item[2], inner: []});
    else items.at(-1).inner.push(line);
  }
  const number = parseInt(items[0].mark, 10);
  const list = element(Number.isNaN(number) ? "ul" : "ol", "", Number.isNaN(number) ? {} : {start: number});
  list.append(...items.map(({first, inner}) => {
    const made = element("li"), begins = inner.findIndex((line) => ITEM.test(line));
    const own = begins < 0 ? inner : inner.slice(0, begins);
    spansInto(made, [first, ...own.map((line) => line.trim())].join("\n"));
    if (begins >= 0) made.append(listOf(inner.slice(begins)));
    return made;
  }));
  return list;
}

function tableOf(lines) {
  const cellsOf = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const rowOf = (line, tag) => {
    const row = element("tr");
    row.append(...cellsOf(line).map((cell) => { const made = element(tag); spansInto(made, cell); return made; }));
    return row;
  };
  const scroll = element("div", "", {class: "scroll", tabindex: "0", role: "region", "aria-label": "Table"});
  const table = element("table"), head = element("thead"), body = element("tbody");
  head.append(rowOf(lines[0], "th"));
  body.append(...lines.slice(2).map((line) => rowOf(line, "td")));
  table.append(head, body);
  scroll.append(table);
  return scroll;
}

function blockElement({kind, language, lines}, depth) {
  if (kind === "code") return codeBlock(lines.join("\n"), language);
  if (kind === "rule") return element("hr");
  if (kind === "list") return listOf(lines);
  if (kind === "table") return tableOf(lines);
  if (kind === "quote") {
    const quote = element("blockquote"), inner = lines.map((line) => line.match(QUOTE)[1]);
    quote.append(...(depth < 8 ? blocksOf(inner.join("\n")).map((block) => blockElement(block, depth + 1)) : inner));
    return quote;
  }
  const heading = kind === "heading" ? lines[0].match(HEADING) : null;
  const made = element(heading ? `h${Math.min(6, 2 + heading[1].length)}` : "p");
  spansInto(made, heading ? heading[2] : lines.join("\n"));
  return made;
}

/** Show markdown in an element. Blocks that have not changed stay, with what is selected or focused in them. */
function showMarkdown(target, text) {
  const blocks = blocksOf(text), before = target.blocks ?? [], now = blocks.map((block) => JSON.stringify(block));
  let same = 0;
  while (same < now.length && now[same] === before[same]) same += 1;
  while (target.children.length > same) target.lastChild.remove();
  target.append(...blocks.slice(same).map((block) => blockElement(block, 0)));
  target.blocks = now;
}
