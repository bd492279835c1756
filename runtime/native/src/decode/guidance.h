// Classifier-free guidance. It compares the predictions with the prompt to the predictions without
// it.
//
// The guided logits are l = l_u + (w + 1)(l_c - l_u), as in LLaDA's loop (arXiv:2502.09992). l_c
// are the logits with the prompt, l_u are the logits of a canvas in which all given tokens are
// masked, and w is the scale. One pass runs both canvases.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "decode/proposer.h"
#include "engines/engine.h"

namespace dlm {

// Computes guided logits. Also computes the candidates and entropies that an engine would return
// for such logits.
class Guided {
 public:
  // Computes the guided predictions of `rows` rows. `conditional` has the predictions with the
  // prompt, and `unconditional` the logits [rows, V] without it. If a row has a NaN or +inf logit,
  // or if all its logits are -inf, its probabilities are NaN.
  Predictions guide(const Denoiser& denoiser, double scale, const Predictions& conditional,
                    const float* unconditional, size_t rows);

 private:
  void rank(const Denoiser& denoiser, size_t row);

  std::vector<float> logits_, probs_, entropy_;
  std::vector<int32_t> tokens_;
};

}  // namespace dlm
