// Describes the layout of JSON text, which is the white space between the parts of the text.
#pragma once

#include <cstdint>
#include <string>

#include "base/json.h"
#include "compile/expression.h"

namespace dlm::compile::schema {

struct Layout {
  std::string item_separator = ",";  // the text between items of an array and between properties
  std::string key_separator = ":";   // between a property's name and its value
  // Spaces of indentation per level, with each item on a line of its own. If `indent` is negative,
  // there are no line breaks.
  int32_t indent = -1;
  bool has_lines = false;  // true: each item of a top-level array is on a line of its own

  // The texts around the items of a container that is not empty: after the opening bracket, between
  // two items, and before the closing bracket. `level` is the number of containers around this
  // container. Empty containers are always written as [] and {}.
  struct Around {
    std::string start, between, end;
  };
  Around around(uint32_t level, bool is_array) const;
  // Returns an ID for the layout of a level. Levels with the same ID have the same layout.
  uint32_t kind_of_level(uint32_t level) const;
};

// Writes a JSON value in the given layout. Characters are escaped only if JSON requires an escape.
// Numbers are written as in the schema.
std::string text_of(const json::Value& value, const Layout& layout, uint32_t level);

// Returns a text that identifies a value. Two values have the same key if and only if the two
// values are equal. 1 and 1.0 are equal, but true and 1 are different.
std::string key_of(const json::Value& value);

// Returns the texts of a container that contains `low` to `high` repetitions of `item`. For an
// object, `item` is a property together with its name.
Node container(Expressions& expressions, const Layout::Around& around, bool is_array, Node item,
               uint32_t low, uint32_t high);

}  // namespace dlm::compile::schema
