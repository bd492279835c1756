// Helpers that several files use to interpret the keywords of a subschema.
#pragma once

#include "compile/schema/document.h"

namespace dlm::compile::schema {

// The schemas of an array's items. Each of the first items can have a different schema. All
// remaining items have the schema `others`, or may have any value if `others` is nullptr.
struct ItemSchemas {
  const json::Value* prefix = nullptr;  // the list of the first items' schemas, or nullptr
  const json::Value* others = nullptr;

  size_t count() const { return prefix == nullptr ? 0 : prefix->elements().size(); }
  // Returns the schema of the item with the given index, or nullptr if the item may be any value.
  const json::Value* at(size_t index) const {
    return index < count() ? &prefix->elements()[index] : others;
  }
};

inline ItemSchemas item_schemas(const Schema& schema) {
  const json::Value* const items = schema[Keyword::items];
  // Before Draft 2020-12, `items` could be the list of the first items' schemas.
  if (items != nullptr && items->kind() == json::Value::Kind::array)
    return {items, schema[Keyword::additional_items]};
  return {schema[Keyword::prefix_items], items};
}

// Returns true if the keyword belongs to the draft (version of JSON Schema) of a schema. Validators
// for this draft ignore all other keywords, so the formula for invalid values ignores them too. The
// formula for valid values usually requires them, because the author of the schema expects this.
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
