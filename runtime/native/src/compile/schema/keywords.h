// What the keywords of a subschema say, in the form that several readers of them need.
#pragma once

#include "compile/schema/document.h"

namespace dlm::compile::schema {

// The schemas of an array's items: those of the first ones, and of all others.
struct ItemSchemas {
  const json::Value* prefix = nullptr;  // a list, or nullptr
  const json::Value* others = nullptr;

  size_t count() const { return prefix == nullptr ? 0 : prefix->elements().size(); }
  // The schema of the item at an index; nullptr: any value.
  const json::Value* at(size_t index) const {
    return index < count() ? &prefix->elements()[index] : others;
  }
};

inline ItemSchemas item_schemas(const Schema& schema) {
  const json::Value* const items = schema[Keyword::items];
  if (items != nullptr && items->kind() == json::Value::Kind::array)  // before Draft 2020-12
    return {items, schema[Keyword::additional_items]};
  return {schema[Keyword::prefix_items], items};
}

// Whether a keyword constrains values in the draft of its schema. Others are annotations to some
// readers, and meant to be obeyed all the same.
inline bool is_of_draft(const Schema& schema, Keyword keyword) {
  const int draft = schema.draft();
  switch (keyword) {
    case Keyword::const_:
    case Keyword::contains:
    case Keyword::property_names:
      return draft >= kDraft6;
    case Keyword::if_:
      return draft >= kDraft7;
    case Keyword::dependent_required:
    case Keyword::dependent_schemas:
    case Keyword::unevaluated_items:
    case Keyword::unevaluated_properties:
    case Keyword::min_contains:
    case Keyword::max_contains:
      return draft >= kDraft2019;
    case Keyword::dependencies:
    case Keyword::additional_items:
      return draft <= kDraft7 || (draft == kDraft2019 && keyword == Keyword::additional_items);
    case Keyword::recursive_ref:
      return draft == kDraft2019;
    case Keyword::dynamic_ref:
      return draft == kDraft2020;
    default:
      return true;
  }
}

}  // namespace dlm::compile::schema
