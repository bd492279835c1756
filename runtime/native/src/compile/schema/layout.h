// Describes the layout of JSON text, which is the white space between the parts of the text.
#pragma once

#include <cstdint>
#include <string>

#include "base/json.h"
#include "compile/automata/expression.h"
#include "compile/json/json_numbers.h"

namespace dlm::compile::schema {

struct Layout {
  std::string item_separator = ",";  // the text between items of an array and between properties
  std::string key_separator = ":";   // the text between a property's name and its value
  // The number of spaces by which each level is indented. If `indent` is 0 or more, each item is on
  // a separate line. If `indent` is negative, there are no line breaks.
  int32_t indent = -1;
  bool has_lines = false;  // true: each item of a top-level array is on a separate line

  // The texts around the items of a container (an array or object) that is not empty. `start` comes
  // after the opening bracket, `between` comes between two items, and `end` comes before the
  // closing bracket. `level` is the number of containers around this container. Empty containers
  // are always written as [] and {}.
  struct Around {
    std::string start, between, end;
  };
  Around around(uint32_t level, bool is_array) const;
  // Returns a number for the layout of a level. If two levels have the same number, they have the
  // same layout.
  uint32_t kind_of_level(uint32_t level) const;
};

// Writes a JSON value in the given layout. Characters are escaped only if JSON requires an escape.
// Numbers are written as in the schema.
std::string text_of(const json::Value& value, const Layout& layout, uint32_t level);

// Returns a text that identifies a value. Two values have the same key if and only if the two
// values are equal. For example, 1 and 1.0 are equal, but true and 1 are different.
std::string key_of(const json::Value& value);
std::string key_of(const Decimal& number);

// Returns the texts of an array or object with `low` to `high` items. `item` contains the texts of
// one item. For an object, an item is a property with its name.
Node container(Expressions& expressions, const Layout::Around& around, bool is_array, Node item,
               uint32_t low, uint32_t high);

}  // namespace dlm::compile::schema
