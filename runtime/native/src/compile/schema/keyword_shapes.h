// Lists the shapes that the specification requires for the values of keywords. For example, the
// value of `required` must be a list of names. The shapes also show where a schema contains
// subschemas.
#pragma once

#include <cstdint>
#include <string_view>
#include <unordered_map>

#include "compile/schema/document.h"

namespace dlm::compile::schema {

// The required shape of a keyword's value.
enum class Shape : uint8_t {
  any,
  boolean,
  text,
  number,
  positive,
  count,
  list,
  names,
  types,
  schema,
  schemas,
  map,
  // A schema. Before Draft 2020-12, the value may also be a list of schemas.
  items,
  // An object whose values are lists of names, as in dependentRequired.
  names_by_name,
  dependencies  // an object whose values are schemas or lists of names
};

Shape shape_of(Keyword keyword);
// Returns a map from the name of each keyword to its value of the enum Keyword.
const std::unordered_map<std::string_view, Keyword>& keywords();

inline bool is_schema(const json::Value& value) {
  return value.kind() == json::Value::Kind::object || value.kind() == json::Value::Kind::boolean;
}

}  // namespace dlm::compile::schema
