const $ = id => document.getElementById(id);
const make = (tag, text, parent, className) => {
  const made = document.createElement(tag);
  if (text !== "") made.textContent = text;
  if (className) made.className = className;
  if (parent) parent.append(made);
  return made;
};
