"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const config = {
    displaylogo: false,
    displayModeBar: "hover",
    responsive: true,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };
  // A finger on a picture scrolls the page.
  const dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";

  // Colours are names of variables in the style sheet, and only where a colour belongs: text of the
  // run that looks like one stays what it is.
  function coloured(value, style, inColour) {
    if (Array.isArray(value)) return value.map((each) => coloured(each, style, inColour));
    if (value !== null && typeof value === "object")
      return Object.fromEntries(
        Object.entries(value).map(([key, each]) => [key, coloured(each, style, /color/.test(key))]),
      );
    if (inColour && typeof value === "string" && value.startsWith("--"))
      return style.getPropertyValue(value).trim();
    return value;
  }

  // Where the legend is one column it takes its room from outside of the picture.
  function heightOf(data, layout) {
    const named = data.filter((trace) => trace.name && trace.showlegend !== false);
    return layout.height + (innerWidth < 640 ? 18 * named.length : 0);
  }

  function draw() {
    const style = getComputedStyle(document.documentElement);
    for (const [id, figure] of Object.entries(figures)) {
      const { data, layout } = coloured(figure, style, false);
      Plotly.react(id, data, { ...layout, dragmode, height: heightOf(data, layout) }, config);
    }
  }

  draw();
  for (const query of ["(prefers-color-scheme: dark)", "print"])
    matchMedia(query).addEventListener("change", draw);
})();
