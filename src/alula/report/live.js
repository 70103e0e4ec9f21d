"use strict";
// The live view: asks every two seconds whether a run has written something, and then takes over the new page's sections
// and curves. What the reader has opened, hidden or selected stays.
const PERIOD = 2000;
const page = document.documentElement;

function take(next) {
  const open = new Map([...document.querySelectorAll("main details")].map((one) => [key(one), one.open]));
  const sections = (root) => [...root.querySelectorAll("main > section:not(#curves)")];
  const [old, now] = [sections(document), sections(next)];
  now.forEach((section, i) => (i < old.length ? old[i].replaceWith(section) : old.at(-1).parentNode.append(section)));
  old.slice(now.length).forEach((section) => section.remove());
  for (const one of document.querySelectorAll("main details")) if (open.has(key(one))) one.open = open.get(key(one));
  const data = next.getElementById("data");
  if (data) show(JSON.parse(data.textContent));
  page.dataset.version = next.documentElement.dataset.version;
}
const key = (details) => details.id || details.querySelector("summary").textContent;
const busy = () => Boolean(document.querySelector(".tip:not([hidden])") || String(getSelection()));

async function poll() {
  const note = document.getElementById("live");
  try {
    const version = await (await fetch("version")).text();
    if (version !== page.dataset.version && !busy()) {
      const text = await (await fetch(location.href)).text();
      take(new DOMParser().parseFromString(text, "text/html"));
      page.dataset.updates = String(Number(page.dataset.updates || 0) + 1);
    }
    note.textContent = "live";
    note.className = "good";
  } catch (error) {
    note.textContent = "not connected: `alula watch` has ended";
    note.className = "bad";
  }
  setTimeout(poll, PERIOD);
}
poll();
