// Layouts of JSON text: the white space that a writer puts between its parts.
#pragma once

#include <cstdint>
#include <string>

#include "base/json.h"
#include "compile/expression.h"

namespace dlm::compile::schema {

struct Layout {
  std::string item_separator = ",";  // between items of an array and between properties
  std::string key_separator = ":";   // between a property's name and its value
  int32_t indent = -1;     // spaces per level, each item on its own line; below 0: no line breaks
  bool has_lines = false;  // each item of an array that is the whole text has its own line

  // The text after the opening bracket, between two items, and before the closing bracket of a
  // container that is not empty; `level` containers are around it. Empty ones are [] and {}.
  struct Around {
    std::string start, between, end;
  };
  Around around(uint32_t level, bool is_array) const;
  // Levels with the same number are written in the same way.
  uint32_t kind_of_level(uint32_t level) const;
};

// A JSON value in a layout, with characters escaped only where JSON requires it, and its numbers
// as the document has them.
std::string text_of(const json::Value& value, const Layout& layout, uint32_t level);

// A text that is the same for equal values alone: those of 1 and 1.0 are, of true and 1 are not.
std::string key_of(const json::Value& value);

// A container in a layout. `item` is an item, or a property with its name, `low` to `high` times.
Node container(Expressions& expressions, const Layout::Around& around, bool is_array, Node item,
               uint32_t low, uint32_t high);

}  // namespace dlm::compile::schema
