// Resolves URI references (RFC 3986, section 5.2) and parses JSON pointers (RFC 6901). It only
// processes text and never retrieves anything.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace dlm::compile::schema {

// Returns the URI of `reference` in a document with URI `base`, without its fragment. `fragment`
// receives the decoded fragment, or nullopt if its percent-encoding is invalid.
std::string resolved(std::string_view base, std::string_view reference,
                     std::optional<std::string>& fragment);

// Returns the steps of a JSON pointer, which is empty or starts with "/". Returns nullopt if it is
// malformed.
std::optional<std::vector<std::string>> pointer_steps(std::string_view pointer);

}  // namespace dlm::compile::schema
