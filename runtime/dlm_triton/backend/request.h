// Reads the tensors and the parameters of a request of Triton.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "response.h"
#include "triton/core/tritonbackend.h"

namespace dlm::triton {

// The tensors and parameters of a request. `input` says which of `text`, `messages` and `ids` is
// set.
struct Asked {
  enum class Input { text, messages, ids };
  Input input = Input::text;
  std::string text;
  std::vector<std::pair<std::string, std::string>> messages;  // role and content
  std::vector<int32_t> ids;

  int32_t max_new_tokens = DLM_DEFAULT_NEW_TOKENS, new_tokens = 0;
  std::string preset, effort;  // "" if not set
  int32_t steps = 0, max_steps = 0, prefix_group = 0;
  double deadline_ms = 0;
  std::vector<std::string> stop_strings;
  bool has_special_tokens = false;
  bool streams = false;
  int32_t constraint_kind = -1;  // DLM_CONSTRAINT_..., or -1 without a constraint
  std::string constraint;
  dlm_policy policy;            // contains only the fields in `changed`
  std::vector<size_t> changed;  // indices of the policy fields that the request sets

  Outputs outputs;
};

// Throws an Error with the status INVALID_ARGUMENT if the request is invalid.
Asked read_request(TRITONBACKEND_Request* request);

// Copies a field of a policy. `index` is the field's index.
void copy_field(size_t index, const dlm_policy& from, dlm_policy& to);

}  // namespace dlm::triton
