// Compiles JSON Schemas to regular languages (sets of texts). Also compiles trees, which combine
// several schemas with other texts.
//
// If a keyword constrains values, the compiler either enforces the keyword, or throws an error that
// names the keyword. So every text in the language has a valid value. But the language does not
// contain all texts with valid values:
//
//   - Objects contain only the properties that the schema names, in the order of the schema. The
//     options any_order and more_properties change this.
//   - Strings use the shortest escapes.
//   - The layout determines the white space.
//
// https://json-schema.org/draft/2020-12/json-schema-validation defines the keywords.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "compile/automata/expression.h"
#include "compile/schema/layout.h"

namespace dlm::compile::schema {

struct Options {
  Layout layout;
  // The largest number of times that values of a schema may be nested inside each other. Also the
  // largest nesting depth of arrays and objects in a value that the schema does not constrain. The
  // default is 3. If the automaton would be too large with this default, the compiler uses a
  // smaller depth.
  std::optional<uint32_t> max_depth;
  // If the estimated number of states is higher than this, the compiler reduces nesting depths and
  // the lengths of strings. 0 means a quarter of Limits::states.
  double most_states = 0;
  uint32_t level = 0;  // number of arrays and objects around the value
  // Objects with up to 6 properties may have their properties in any order.
  bool any_order = false;
  bool more_properties = false;  // objects may have properties that the schema does not name
};

struct Texts {
  Node node;
  // Warnings about keywords that look misspelled, and about valid values that the compiler left
  // out.
  std::vector<std::string> warnings;
  double size = 0;          // estimated number of states
  bool is_smallest = true;  // true if a smaller most_states would not reduce `size`
  std::string none = "";    // the error message if `node` matches no text
};

// All functions below throw an Error with status DLM_INVALID_ARGUMENT if a schema is not valid or
// not supported. The message contains the keyword, and its position in the schema.

// Returns the texts of the values that are valid against a JSON Schema.
Texts schema_texts(Expressions& expressions, std::string_view schema, const Options& options);

Texts object_texts(Expressions& expressions, const Options& options);

// Returns the strings of a JSON list as plain texts, without quotes. For example, the list
// ["a","b"] gives the texts a and b.
Texts listed_texts(Expressions& expressions, std::string_view list);

// Returns the texts that a tree describes. A tree combines constraints with fixed text. A tree is
// written as nested JSON objects. Each object contains one of these members:
//
//   {"text": "..."}                          this text
//   {"token": "<tool_call>"}                 the tokenizer's added token with this name
//   {"schema": S, "level": 1}                a value of schema S, inside `level` containers
//   {"schema": S, "quote": "<|>"}            the same, without quotes around names, and with the
//                                            added token <|> before and after strings, in which
//                                            nothing is escaped
//   {"json_object": true, "level": 0}        any JSON object, inside `level` containers
//   {"regex": "..."}                         the texts that the expression matches as a whole
//   {"grammar": "..."}                       the texts of a grammar in GBNF
//   {"json_lines": S, "low": 1, "high": 9}   1 to 9 values of schema S, each on its own line
//   {"csv": S, ...}, {"xml": S}              a CSV table or an XML element; see records.h
//   {"sequence": [...]}, {"either": [...]}   all parts one after the other, or one of the parts
//   {"repeat": X, "low": 0, "high": 5}       X, 0 to 5 times; without "high", any number of times
//
// An object may also contain the member "name". Error messages and warnings about the object start
// with this name.
Texts tree_texts(Expressions& expressions, std::string_view tree, const Options& options);

}  // namespace dlm::compile::schema
