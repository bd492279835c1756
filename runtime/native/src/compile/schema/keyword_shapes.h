// The shapes that the specification asks for in the values of keywords, which also say where
// subschemas are.
#pragma once

#include <cstdint>
#include <string_view>
#include <unordered_map>

#include "compile/schema/document.h"

namespace dlm::compile::schema {

// What a keyword's value has to be.
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
  items,          // a schema, or a list of them before Draft 2020-12
  names_by_name,  // of dependentRequired
  dependencies    // of each name, a schema or names
};

Shape shape_of(Keyword keyword);
// The keywords by their names.
const std::unordered_map<std::string_view, Keyword>& keywords();

inline bool is_schema(const json::Value& value) {
  return value.kind() == json::Value::Kind::object || value.kind() == json::Value::Kind::boolean;
}

}  // namespace dlm::compile::schema
