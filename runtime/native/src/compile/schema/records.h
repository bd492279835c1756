// Builds the regular languages of CSV and XML texts. A JSON Schema describes the data in the texts.
#pragma once

#include <cstdint>
#include <utility>

#include "base/json.h"
#include "compile/expression.h"
#include "compile/schema/schema.h"

namespace dlm::compile::schema {

// Reads the members "low" and "high" of a description, for example of {"csv": ..., "low": 1,
// "high": 9}. Each must be in 0..`most`. The parameter `low` is the default of "low". Without
// "high", there is no upper limit.
std::pair<uint32_t, uint32_t> counts(const json::Value& description, uint32_t low, int64_t most);

// Returns a part repeated `low` to `high` times, with a separator between repetitions.
Node separated(Expressions& expressions, Node part, Node separator, uint32_t low, uint32_t high);

// Both functions below throw Error(DLM_INVALID_ARGUMENT). The message gives the place in the schema
// and the keyword.

// Returns the texts of all CSV tables (RFC 4180) that `description` allows. The description has
// these members:
//
//   "csv"        the schema of a row: an object whose properties are the columns
//   "header"     true (default) if the first line has the names of the columns
//   "delimiter"  "," (default), ";", "|" or a tab
//   "line_end"   "\n" (default) or "\r\n"
//   "low", "high"  minimum (default: 1) and maximum (default: unlimited) number of rows
//
// Fields are quoted only if necessary. A null is written as an empty field, and so is a missing
// property.
Texts csv_texts(Expressions& expressions, const json::Value& description, const Options& options);

// Returns the XML texts of an element. There is no white space between elements. The properties of
// an object are child elements, in the order of the schema. An array is written by repeating its
// element. The keyword `xml` of OpenAPI (https://spec.openapis.org/oas/v3.1.0#xml-object) changes
// the names of elements, makes attributes of properties, and wraps arrays in an element.
Texts xml_texts(Expressions& expressions, const json::Value& schema, const Options& options);

}  // namespace dlm::compile::schema
