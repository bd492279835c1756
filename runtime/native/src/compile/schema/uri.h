// Resolves URI references (RFC 3986, section 5.2) and parses JSON pointers (RFC 6901). The
// functions only process text, and never retrieve a document.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace dlm::compile::schema {

// Returns the absolute URI of `reference`, without its fragment. `base` is the URI of the document
// that contains the reference. Sets `fragment` to the decoded fragment, or to nullopt if the
// percent-encoding of the fragment is not valid.
std::string resolved(std::string_view base, std::string_view reference,
                     std::optional<std::string>& fragment);

// Returns the parts of a JSON pointer, called steps. For example, "/a/0" has the steps "a" and "0".
// An empty pointer has no steps. Returns nullopt if the pointer is not valid.
std::optional<std::vector<std::string>> pointer_steps(std::string_view pointer);

}  // namespace dlm::compile::schema
