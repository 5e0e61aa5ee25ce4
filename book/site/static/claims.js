// A filter above the table of claims: by document, kind, verdict and words. Without this script
// the table is whole.
document.addEventListener("DOMContentLoaded", () => {
  const table = document.querySelector("table.claims");
  const rows = [...table.tBodies[0].rows];
  const texts = rows.map(row => row.textContent.toLowerCase());

  const form = document.createElement("form");
  form.className = "claims-filter";
  form.addEventListener("submit", event => event.preventDefault());
  const count = document.createElement("output");

  function field(name, control) {
    const label = document.createElement("label");
    label.append(name, control);
    form.append(label);
    control.addEventListener("input", filter);
    return control;
  }

  // The choices are those that occur: a row has the classes document-wm, kind-table, verdict-holds.
  function choice(kind) {
    const classes = rows.map(row => [...row.classList].find(c => c.startsWith(`${kind}-`)));
    const select = document.createElement("select");
    select.append(new Option("all", ""));
    for (const one of new Set(classes)) {
      select.append(new Option(one.slice(kind.length + 1).replaceAll("-", " "), one));
    }
    return field(kind, select);
  }

  const choices = ["document", "kind", "verdict"].map(choice);
  const words = field("words", Object.assign(document.createElement("input"), { type: "search" }));

  function filter() {
    const wanted = choices.map(choice => choice.value).filter(Boolean);
    const asked = words.value.toLowerCase().split(/\s+/);
    let shown = 0;
    rows.forEach((row, i) => {
      row.hidden = !wanted.every(one => row.classList.contains(one))
        || !asked.every(word => texts[i].includes(word));
      shown += !row.hidden;
    });
    count.textContent = `${shown} of ${rows.length} claims`;
  }

  form.append(count);
  filter();
  (table.closest(".table-wrapper") ?? table).before(form);
});
