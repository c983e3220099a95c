"""Every method on every benchmark: how fast, how much accepted, and how true the answers stay.

items      one question about one video        methods   what is compared: drafts, acceptance, their names
world      items of the drawn test world       datasets/ items of published benchmarks, from a local folder
records    one answer's figures, resumable     runs      asks through the three services
summary    figures over items, with intervals  theory    what T should be by the mismatch rate
tables, plots, report                          text_metrics, judge   scores of free text
"""
