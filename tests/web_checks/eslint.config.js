// ESLint for the modules of bridge/web: `make check` runs it from the root of the clone.

import js from "@eslint/js";
import globals from "globals";

export default [
  js.configs.recommended,
  {
    languageOptions: {ecmaVersion: 2024, sourceType: "module", globals: globals.browser},
    rules: {eqeqeq: ["error", "always", {null: "ignore"}], "no-var": "error", "prefer-const": "error", "max-lines": ["error", 300]},
  },
];
