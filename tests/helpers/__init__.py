"""What the contract tests share: paths, inputs with poison and guard bands, the accuracy rule, one check of a case."""
