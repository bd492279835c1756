// JSON Schemas, and texts that are made of them, as regular languages: what the C ABI compiles.
//
// All assertions of a schema are kept, or rejected by name: a text of the language is always valid.
// But some valid texts are not in the language. Objects have their properties in the schema's order
// and only those that it names; strings use the short escapes; the layout says where white space
// is. https://json-schema.org/draft/2020-12/json-schema-validation names the keywords.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "compile/expression.h"
#include "compile/schema/layout.h"

namespace dlm::compile::schema {

struct Options {
  Layout layout;
  // The number of times that a schema may contain itself, and of containers that may be inside each
  // other where a schema allows any value. By default 3, or less if the automaton would be too
  // large for the limits.
  std::optional<uint32_t> max_depth;
  // If the automaton seems to have more states, depths are smaller, and long strings shorter. 0: a
  // quarter of the limit.
  double most_states = 0;
  uint32_t level = 0;            // containers around the value
  bool any_order = false;        // objects of up to 6 properties have them in any order
  bool more_properties = false;  // also those that the schema allows but does not name
};

struct Texts {
  Node node;
  std::vector<std::string> warnings;  // of keywords that look misspelled, and of what is left out
  double size = 0;                    // an estimate of the states
  bool is_smallest = true;            // a smaller most_states changes nothing
};

// All functions below throw Error(DLM_INVALID_ARGUMENT) with the place and the keyword.

// Values that are valid by a JSON Schema.
Texts schema_texts(Expressions& expressions, std::string_view schema, const Options& options);

// Any JSON object.
Texts object_texts(Expressions& expressions, const Options& options);

// The texts of a JSON list of strings, as they are.
Texts listed_texts(Expressions& expressions, std::string_view list);

// A text with JSON inside, as a tree of JSON objects, each with one of these members:
//   {"text": "..."}                          this text
//   {"schema": S, "level": 1}                a value of a schema, with containers around it
//   {"json_object": true, "level": 0}        any JSON object
//   {"regex": "..."}                         texts that match as a whole
//   {"grammar": "..."}                       a grammar in GBNF
//   {"json_lines": S, "low": 1, "high": 9}   values of a schema, each on its own line
//   {"csv": S, ...}, {"xml": S}              a table, and an element: records.h
//   {"sequence": [...]}, {"either": [...]}   parts one after the other, or one of them
//   {"repeat": X, "low": 0, "high": 5}       without "high": any number of times
// "name" beside what is compiled is put in front of error messages and warnings.
Texts tree_texts(Expressions& expressions, std::string_view tree, const Options& options);

}  // namespace dlm::compile::schema
