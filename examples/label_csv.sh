#!/bin/sh
# Label each row of a CSV: one answer of good or bad per row, in labels.csv beside it.
#
#   sh examples/label_csv.sh reviews.csv [MODEL]
#
# The rows run in the order that reuses most, and the question is evaluated once. After Ctrl-C or a
# crash, the same command continues where it stopped. The table needs the columns id and text;
# --choices needs the extra `serve`.
set -eu
table=${1:?give a table: sh examples/label_csv.sh reviews.csv}
model=${2:-demo}
labels=$(dirname "$table")/labels.csv

mlxrunner batch "$table" -m "$model" -o "$labels" --resume --quiet --no-usage \
  --system "Say whether the customer is happy (good) or not (bad)." \
  --row-template "{text}" --choices good,bad
cut -d, -f1,3 "$labels"
