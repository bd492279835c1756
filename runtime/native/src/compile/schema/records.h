// Builds the regular languages (sets of texts) of CSV tables and XML elements. A JSON Schema
// describes the data in these texts.
#pragma once

#include <cstdint>
#include <utility>

#include "base/json.h"
#include "compile/automata/expression.h"
#include "compile/schema/schema.h"

namespace dlm::compile::schema {

// Returns the values of the members "low" and "high" of a description such as {"csv": ..., "low":
// 1, "high": 9}. Throws an error if one of these members is not between 0 and `most`. If "low" is
// missing, returns the parameter `low` instead. If "high" is missing, there is no upper limit.
std::pair<uint32_t, uint32_t> counts(const json::Value& description, uint32_t low, int64_t most);

// Returns the texts of `low` to `high` repetitions of `part`, with `separator` between them.
Node separated(Expressions& expressions, Node part, Node separator, uint32_t low, uint32_t high);

// The two functions below throw an Error with status DLM_INVALID_ARGUMENT if they do not support a
// schema. The message contains the keyword that is not supported, and its position in the schema.

// Returns the texts of all CSV tables (RFC 4180) that `description` allows. The description
// contains these members:
//
//   "csv"        the schema of a row: an object whose properties are the columns
//   "header"     true (default) if the first line contains the column names
//   "delimiter"  "," (default), ";", "|" or a tab
//   "line_end"   "\n" (default) or "\r\n"
//   "low"        smallest number of rows (default: 1)
//   "high"       largest number of rows (default: unlimited)
//
// Fields have quotes only if necessary. A property that is null or missing is written as an empty
// field.
Texts csv_texts(Expressions& expressions, const json::Value& description, const Options& options);

// Returns the texts of the XML elements that a schema describes. There is no white space between
// elements. The properties of an object are child elements, in the order of the schema. An array is
// written by repeating its element. The keyword `xml` of OpenAPI
// (https://spec.openapis.org/oas/v3.1.0#xml-object) can rename elements, turn properties into
// attributes, and put an element around an array.
Texts xml_texts(Expressions& expressions, const json::Value& schema, const Options& options);

}  // namespace dlm::compile::schema
