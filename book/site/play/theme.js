// The switch that the site's pages have, too: as the system has it, light, dark.
"use strict";

const THEMES = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" };

function wear(theme) {
  document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = THEMES[theme];
}

document.getElementById("theme").onclick = () => {
  const names = Object.keys(THEMES), old = document.documentElement.dataset.theme;
  const theme = names[(names.indexOf(old) + 1) % names.length];
  localStorage.setItem("theme", theme);  // where furo keeps it
  wear(theme);
};
wear(document.documentElement.dataset.theme in THEMES ? document.documentElement.dataset.theme : "auto");
