// CSV and XML that a JSON Schema describes, as regular languages.
#pragma once

#include <cstdint>
#include <utility>

#include "base/json.h"
#include "compile/expression.h"
#include "compile/schema/schema.h"

namespace dlm::compile::schema {

// Members "low" and "high" of a description, 0..`most`: how often something is there. Without
// "high": any number of times.
std::pair<uint32_t, uint32_t> counts(const json::Value& description, uint32_t low, int64_t most);

// A part `low` to `high` times, with a separator between each two.
Node separated(Expressions& expressions, Node part, Node separator, uint32_t low, uint32_t high);

// Both functions below throw Error(DLM_INVALID_ARGUMENT) with the place and the keyword.

// A table by RFC 4180. `description` has these members:
//   "csv"        a schema of a row: an object whose properties are the columns
//   "header"     whether the first line has the names of the columns (true)
//   "delimiter"  "," (default), ";", "|" or a tab
//   "line_end"   what is between two lines: "\n" (default) or "\r\n"
//   "low", "high"  how many rows there are (1, any number)
// Fields are quoted only where they have to be. A null, or a property that is left out, is an empty
// field.
Texts csv_texts(Expressions& expressions, const json::Value& description, const Options& options);

// An element, without white space between elements. Properties are child elements in the schema's
// order; an array repeats its element. The keyword `xml` of OpenAPI
// (https://spec.openapis.org/oas/v3.1.0#xml-object) sets names, attributes and wrapped arrays.
Texts xml_texts(Expressions& expressions, const json::Value& schema, const Options& options);

}  // namespace dlm::compile::schema
