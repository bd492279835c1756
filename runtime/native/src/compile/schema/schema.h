// Compiles JSON Schemas, and texts made of several of them, to regular languages. The C API uses
// it.
//
// Every assertion of a schema is either enforced or rejected with an error that names it. So every
// text of the language is valid. Not every valid text is in the language: objects have only the
// properties that the schema names, in the schema's order; strings use short escapes; the layout
// sets the white space. https://json-schema.org/draft/2020-12/json-schema-validation defines the
// keywords.
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
  // Limits how often a schema may contain itself, and how deep containers may nest where a schema
  // allows any value. The default is 3, or less if the automaton would exceed the limits.
  std::optional<uint32_t> max_depth;
  // If the estimated number of states is higher than this, depths and the lengths of strings are
  // reduced. 0 means a quarter of the limit.
  double most_states = 0;
  uint32_t level = 0;            // number of containers around the value
  bool any_order = false;        // any order of properties in objects with up to 6
  bool more_properties = false;  // also those that the schema allows but does not name
};

struct Texts {
  Node node;
  std::vector<std::string> warnings;  // about misspelled keywords and values that are left out
  double size = 0;                    // estimated number of states
  bool is_smallest = true;            // a smaller most_states would not reduce it
};

// All functions below throw Error(DLM_INVALID_ARGUMENT) with the place and the keyword.

// Returns the values that are valid by a JSON Schema.
Texts schema_texts(Expressions& expressions, std::string_view schema, const Options& options);

// Returns all JSON objects.
Texts object_texts(Expressions& expressions, const Options& options);

// Returns the strings of a JSON list, unquoted.
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
